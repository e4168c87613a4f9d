/* wander SEED STEPS: a program that does what few programs do, in an order that the seed settles. It makes contexts of its own by the
 * driver's plain and versioned names, and ends them so; it begins captures before it has any memory; it forks in turns. What it has written
 * is compared all the time.
 *
 * It says "ok" when it has memory, and when its steps are over. Then it waits for the end of its input, compares all once more and ends. */
#include "../simcuda/programs/driver.h"

#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONTEXTS = 4, BLOCKS = 6, WORDS_MAX = 1 << 20, RELAXED = 2, TURNS_MAX = 2 };

typedef CUresult (*make_context)(CUcontext *, unsigned, CUdevice);
typedef CUresult (*with_handle)(void *);

static struct {
    make_context make[2];
    with_handle destroy[2], destroy_stream[2];
    CUresult (*begin_capture)(CUstream, int);
} names;

typedef struct {
    CUdeviceptr at;
    unsigned words, value;
} block;

static struct {
    CUcontext context;
    CUstream stream;
    block blocks[BLOCKS];
} places[CONTEXTS];

static int turns;
static int (*turn_begin)(uint32_t), (*turn_end)(void);

static uint64_t chance_state;

static unsigned chance(unsigned below)
{
    uint64_t mixed = chance_state += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return (unsigned)((mixed ^ (mixed >> 31)) % below);
}

static void say(const char *line)
{
    printf("%s\n", line);
    fflush(stdout);
}

static void wrong(const char *what)
{
    printf("fail %s\n", what);
    fflush(stdout);
    _exit(1);
}

static void *named(const char *name)
{
    void *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    if (found == NULL)
        driver_missing(name);
    return found;
}

static void look_up(void)
{
    *(void **)&names.make[0] = named("cuCtxCreate");
    *(void **)&names.make[1] = named("cuCtxCreate_v2");
    *(void **)&names.destroy[0] = named("cuCtxDestroy");
    *(void **)&names.destroy[1] = named("cuCtxDestroy_v2");
    *(void **)&names.destroy_stream[0] = named("cuStreamDestroy");
    *(void **)&names.destroy_stream[1] = named("cuStreamDestroy_v2");
    *(void **)&names.begin_capture = named("cuStreamBeginCapture_v2");
    *(void **)&turn_begin = dlsym(RTLD_DEFAULT, "sublet_turn_begin");
    *(void **)&turn_end = dlsym(RTLD_DEFAULT, "sublet_turn_end");
    if (turn_begin == NULL || turn_end == NULL)
        wrong("it does not run under Sublet");
}

/* The place is current behind this. False where there is no context. */
static bool enter(int place)
{
    if (places[place].context == NULL)
        return false;
    OK(cuCtxSetCurrent(places[place].context));
    return true;
}

static void compare(int place, block *of)
{
    uint64_t sum = driver_sum(of->at, of->words, places[place].stream);
    if (sum != (uint64_t)of->words * of->value)
        wrong("other contents than were written");
}

static void write_block(int place, block *of)
{
    of->value = 1 + chance(1000);
    OK(cuMemsetD32Async(of->at, of->value, of->words, places[place].stream));
}

static void make_block(int place, block *of)
{
    of->words = 1024 + chance(WORDS_MAX);
    if (cuMemAlloc(&of->at, (size_t)of->words * 4) != CU_OK) {
        *of = (block){0};
        return;
    }
    write_block(place, of);
}

static void free_block(int place, block *of)
{
    compare(place, of);
    if (chance(3) == 0) {
        OK(cuMemFreeAsync(of->at, places[place].stream));
    } else {
        OK(cuMemFree(of->at));
    }
    *of = (block){0};
}

static void make_place(int place)
{
    OK(names.make[chance(2)](&places[place].context, 0, 0));
    OK(cuStreamCreate(&places[place].stream, 1));
}

static void end_place(int place)
{
    if (!enter(place))
        return;
    for (int i = 0; i < BLOCKS; i++)
        if (places[place].blocks[i].at != 0)
            compare(place, &places[place].blocks[i]);
    if (chance(2) == 0)
        OK(names.destroy_stream[chance(2)](places[place].stream));
    OK(names.destroy[chance(2)](places[place].context));
    memset(&places[place], 0, sizeof places[place]);
}

/* A capture that a pause may meet; it must end well whatever the pause does. */
static void capture(int place, block *of)
{
    CUgraph graph = NULL;
    CUgraphExec ready = NULL;
    CUstream stream = places[place].stream;
    OK(names.begin_capture(stream, RELAXED));
    if (of->at != 0)
        write_block(place, of);
    usleep(chance(8000));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&ready, graph, 0));
    OK(cuGraphLaunch(ready, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuGraphExecDestroy(ready));
    OK(cuGraphDestroy(graph));
    if (of->at != 0)
        compare(place, of);
}

/* A child ends in one of the ways in which children end; what it ends is its own alone. */
static void fork_one(void)
{
    unsigned how = chance(3);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (how == 0)
            turn_end();
        if (how == 1)
            exit(0);
        _exit(0);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        wrong("a child did not end well");
}

static void begin_turn(void)
{
    int code = turn_begin(30000);
    if (code == 0)
        turns++;
    else
        fprintf(stderr, "no turn: %d\n", code);
}

static void end_turn(void)
{
    if (turn_end() != 0)
        wrong("a turn had ended before its end");
    turns--;
}

static void step(void)
{
    int place = (int)chance(CONTEXTS);
    if (!enter(place)) {
        if (chance(3) == 0)
            make_place(place);
        return;
    }
    block *of = &places[place].blocks[chance(BLOCKS)];
    switch (chance(14)) {
    case 0:
        if (place > 0)
            end_place(place);
        break;
    case 1:
        capture(place, of);
        break;
    case 2:
        fork_one();
        break;
    case 3:
        if (turns < TURNS_MAX)
            begin_turn();
        break;
    case 4:
    case 5:
        if (turns > 0)
            end_turn();
        break;
    case 6:
        usleep(chance(4000));
        break;
    default:
        if (of->at == 0)
            make_block(place, of);
        else if (chance(3) == 0)
            free_block(place, of);
        else if (chance(2) == 0)
            write_block(place, of);
        else
            compare(place, of);
    }
}

int main(int count, char **words)
{
    if (count != 3)
        return 2;
    chance_state = strtoull(words[1], NULL, 10);
    int steps = atoi(words[2]);
    driver_start();
    look_up();
    /* The first place has the primary context, or another one where nobody has a primary one. */
    if (chance(2) == 0) {
        OK(cuDevicePrimaryCtxRetain(&places[0].context, 0));
        enter(0);
        OK(cuStreamCreate(&places[0].stream, 1));
    } else {
        make_place(0);
    }
    /* A capture from before the process has joined its tenant ends behind that. */
    CUstream early = NULL;
    CUgraph graph = NULL;
    if (chance(2) == 0) {
        OK(cuStreamCreate(&early, 1));
        OK(names.begin_capture(early, RELAXED));
    }
    make_block(0, &places[0].blocks[0]);
    if (places[0].blocks[0].at == 0)
        wrong("no memory at the start");
    say("ok");
    if (early != NULL) {
        usleep(chance(30000));
        OK(cuStreamEndCapture(early, &graph));
        OK(cuGraphDestroy(graph));
    }
    for (int i = 0; i < steps; i++)
        step();
    while (turns > 0)
        end_turn();
    say("ok");
    while (getchar() != EOF)
        ;
    for (int place = CONTEXTS - 1; place >= 0; place--) {
        for (int i = 0; i < BLOCKS && enter(place); i++)
            if (places[place].blocks[i].at != 0)
                free_block(place, &places[place].blocks[i]);
        if (place > 0)
            end_place(place);
    }
    say("ok");
    return 0;
}
