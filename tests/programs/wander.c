/* wander SEED STEPS: a program that does what few programs do, in an order that the seed settles. It makes contexts of its own by the
 * driver's plain and versioned names, and ends them so; it begins captures before it has any memory; it forks in turns; it pauses a tag of
 * its own and touches what is away. It handles SIGINT and SIGTERM, which end its wait for a turn. What it has written is compared all the
 * time.
 *
 * It says "ok" when it has memory, and when its steps are over. Then it waits for the end of its input, compares all once more and ends. */
#include "../simcuda/programs/driver.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONTEXTS = 4, BLOCKS = 6, WORDS_MAX = 1 << 20, RELAXED = 2, TURNS_MAX = 2 };
enum { TAGGED_WORDS_MIN = 1 << 18, WHOSE_PROCESS = 1, KEEP = 0, NOT_PERMITTED = 800 };

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
    bool has_tag;
} block;

static struct {
    CUcontext context;
    CUstream stream;
    block blocks[BLOCKS];
} places[CONTEXTS];

static int turns;
static int (*turn_begin)(uint32_t), (*turn_end)(void);

typedef int (*change_tags)(const char *, const char *const *, size_t, int, uint32_t);

static const char *const tags[] = {"apart"};
static change_tags pause_tags, resume_tags;
static int (*region_begin)(const char *, int), (*region_end)(void), (*tag_is_paused)(const char *);

static volatile sig_atomic_t is_signalled;

static void note_signal(int number)
{
    (void)number;
    is_signalled = 1;
}

static int is_called_off(void *context)
{
    (void)context;
    return is_signalled;
}

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

static void *ours(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL)
        wrong("it does not run under Sublet");
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
    int (*ask_while_waiting)(int (*)(void *), void *);
    *(void **)&turn_begin = ours("sublet_turn_begin");
    *(void **)&turn_end = ours("sublet_turn_end");
    *(void **)&ask_while_waiting = ours("sublet_ask_while_waiting");
    *(void **)&pause_tags = ours("sublet_pause_tags");
    *(void **)&resume_tags = ours("sublet_resume_tags");
    *(void **)&tag_is_paused = ours("sublet_tag_is_paused");
    *(void **)&region_begin = ours("sublet_region_begin");
    *(void **)&region_end = ours("sublet_region_end");
    ask_while_waiting(is_called_off, NULL);
}

/* From now on these signals interrupt calls of the system's. */
static void handle_signals(void)
{
    struct sigaction action = {.sa_handler = note_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* The place is current behind this. False where there is no context. */
static bool enter(int place)
{
    if (places[place].context == NULL)
        return false;
    OK(cuCtxSetCurrent(places[place].context));
    return true;
}

/* This program alone pauses the tag, and others may bring it back. */
static bool tag_is_away;

static bool is_away(const block *of)
{
    return of->has_tag && tag_is_away;
}

static void compare(int place, block *of)
{
    if (is_away(of))
        return;
    uint64_t sum = driver_sum(of->at, of->words, places[place].stream);
    if (sum != (uint64_t)of->words * of->value)
        wrong("other contents than were written");
}

/* A fill or copy of what is away is refused and does nothing. What has come back meanwhile is as it was. */
static void touch_away(int place, block *of)
{
    unsigned word = 0;
    CUresult code = chance(2) == 0 ? cuMemsetD32Async(of->at, of->value, of->words, places[place].stream)
                                   : cuMemcpyDtoH(&word, of->at, sizeof word);
    if (code == NOT_PERMITTED)
        return;
    OK(code);
    tag_is_away = false;
    compare(place, of);
}

static void write_block(int place, block *of)
{
    if (is_away(of)) {
        touch_away(place, of);
        return;
    }
    of->value = 1 + chance(1000);
    OK(cuMemsetD32Async(of->at, of->value, of->words, places[place].stream));
}

static void make_block(int place, block *of)
{
    of->words = 1024 + chance(WORDS_MAX);
    /* New memory of a tag that is away would be there. */
    of->has_tag = chance(3) == 0 && !tag_is_away;
    /* What is smaller stays with the driver. */
    of->words += of->has_tag ? TAGGED_WORDS_MIN : 0;
    if (of->has_tag && region_begin(tags[0], KEEP) != 0)
        wrong("no region");
    CUresult code = cuMemAlloc(&of->at, (size_t)of->words * 4);
    if (of->has_tag)
        region_end();
    if (code != CU_OK) {
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
    bool is_there = of->at != 0 && !of->has_tag;
    if (is_there)
        write_block(place, of);
    usleep(chance(8000));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&ready, graph, 0));
    OK(cuGraphLaunch(ready, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuGraphExecDestroy(ready));
    OK(cuGraphDestroy(graph));
    if (is_there)
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
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    if (status != 0)
        wrong("a child did not end well");
}

static void begin_turn(void)
{
    is_signalled = 0;
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

/* Where a command is under way, either may be refused. */
static void move_tag(void)
{
    int code = (tag_is_away ? resume_tags : pause_tags)(NULL, tags, 1, WHOSE_PROCESS, 0);
    if (code == 0)
        tag_is_away = !tag_is_away;
    else
        fprintf(stderr, "the tag stays as it is: %d\n", code);
}

/* Until the end of the input, whatever signals come. */
static void wait_for_end(void)
{
    char byte;
    ssize_t came;
    do
        came = read(0, &byte, 1);
    while (came > 0 || (came < 0 && errno == EINTR));
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
    switch (chance(16)) {
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
    case 7:
        move_tag();
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
    handle_signals();
    driver_start();
    look_up();
    /* Kernels end with the context that they are loaded in: this one stays. */
    driver_kernel("sum_u32");
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
    wait_for_end();
    if (tag_is_paused(tags[0]) == 1 && resume_tags(NULL, tags, 1, WHOSE_PROCESS, 0) != 0)
        wrong("its tag does not come back");
    tag_is_away = false;
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
