/* Memory that ends with its context, one word an argument:
 *
 *   destroy   a context of the program's own, next to the primary one
 *   detach    the same, by its last reference
 *   release   the primary context, by its last reference, after a pause
 *   reset     the primary context, even if others retain it
 *   paused    a context ends while the process is paused
 *   storm     contexts come and go while the process is paused and resumed
 *   alone     a program that has a context of its own alone is paused, and gets no primary one
 *   plain     destroy, by the names of CUDA 2
 *   late      a block is given up twice simultaneously, by a stream that has freed it and with its context; another lies there then
 *   work      a kernel runs in a context that is older than an attach; plain-work: in one made by the name of CUDA 2
 *   refused   the driver refuses the end of a context, in which a kernel runs then; held: another reference keeps the context
 *   owner     a block is freed in the primary context, while the context that it was made in works with it
 *   others    a block is freed in a context of another device, while a context works with it that it was not made in
 *   captured  a context ends while a stream of it is captured
 *   again     contexts come and go while there is no other, and are paused each
 *   survivor  a context of the program's own outlives a reset of the primary one
 *
 * It prints the same with and without Sublet. */
#include "driver.h"
#include "attach.h"
#include "inside.h"

#include <pthread.h>
#include <stdbool.h>

enum { BYTES = 64 << 20, WORDS = BYTES / 4, WORK_BYTES = 4 << 20, WORK_WORDS = WORK_BYTES / 4 };

#define CONTEXT_FUNCTIONS(X) \
    X(create, cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) \
    X(destroy, cuCtxDestroy_v2, (CUcontext)) \
    X(create_plain, cuCtxCreate, (CUcontext *, unsigned, CUdevice)) \
    X(destroy_plain, cuCtxDestroy, (CUcontext)) \
    X(attach, cuCtxAttach, (CUcontext *, unsigned)) \
    X(detach, cuCtxDetach, (CUcontext)) \
    X(reset, cuDevicePrimaryCtxReset_v2, (CUdevice)) \
    X(state, cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *))

#define DECLARE_CONTEXT(name, symbol, arguments) static CUresult(*context_##name) arguments;
CONTEXT_FUNCTIONS(DECLARE_CONTEXT)

static CUcontext primary;

static void look_up(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
#define LOOK_UP(name, symbol, arguments) \
    if ((*(void **)&context_##name = dlsym(library, #symbol)) == NULL) \
        driver_missing(#symbol);
    CONTEXT_FUNCTIONS(LOOK_UP)
}

static size_t used_before;

/* Free bytes of device 0, read in the primary context. */
static void note_free_bytes(void)
{
    OK(cuCtxSetCurrent(primary));
    used_before = driver_free_bytes();
}

static void print_freed(const char *what)
{
    OK(cuCtxSetCurrent(primary));
    long long freed = (long long)driver_free_bytes() - (long long)used_before;
    printf("%s: %lld bytes less are free\n", what, -freed);
}

/* A block and a small allocation in the current context, and a block in the primary one. */
static CUdeviceptr made[3];

static void make(CUcontext context)
{
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc(&made[0], BYTES));
    OK(cuMemAlloc(&made[1], 512));
    OK(cuMemsetD8(made[0], 1, BYTES));
    OK(cuCtxSetCurrent(primary));
    OK(cuMemAlloc(&made[2], BYTES));
    driver_fill(made[2], 7, WORDS, NULL);
}

/* Only the primary context's block is left, with its contents, also after a pause. */
static void print_left(const char *what)
{
    print_freed(what);
    for (int i = 0; i < 2; i++)
        printf("%s: free of %d: %s\n", what, i, driver_error(cuMemFree(made[i])));
    inside_pause();
    inside_resume();
    printf("%s: sum %llu\n", what, (unsigned long long)driver_sum(made[2], WORDS, NULL));
    OK(cuMemFree(made[2]));
    print_freed(what);
}

static void destroy(void)
{
    CUcontext own = NULL;
    note_free_bytes();
    OK(context_create(&own, 0, 0));
    make(own);
    OK(context_destroy(own));
    print_left("destroy");
}

static void plain(void)
{
    CUcontext own = NULL;
    note_free_bytes();
    OK(context_create_plain(&own, 0, 0));
    make(own);
    OK(context_destroy_plain(own));
    print_left("plain");
}

static void end_nothing(CUcontext own)
{
    (void)own;
}

static void end_refused(CUcontext own)
{
    printf("refused: %s\n", driver_error(context_destroy(own)));
}

static void end_one_of_two(CUcontext own)
{
    CUcontext again = NULL;
    OK(context_attach(&again, 0));
    OK(context_detach(own));
}

/* A pause finds work in that context, and memory that the work is about to use. The context has outlived `end`. */
static void work(const char *what, CUresult (*create)(CUcontext *, unsigned, CUdevice), void (*end)(CUcontext))
{
    CUcontext own = NULL;
    CUstream working = NULL, other = NULL;
    CUdeviceptr block = 0, flag = 0;
    OK(create(&own, 0, 0));
    attach_if_asked();
    driver_load();
    OK(cuMemAlloc(&block, WORK_BYTES));
    OK(cuMemAlloc(&flag, 4));
    OK(cuMemsetD8(flag, 0, 4));
    OK(cuCtxSynchronize());
    OK(cuStreamCreate(&working, 1));
    OK(cuStreamCreate(&other, 1));
    end(own);
    void *params[] = {&flag};
    driver_launch("spin_until_nonzero", working, params);
    driver_fill(block, 7, WORK_WORDS, working);
    if (inside_is_paused_within(1000)) {
        printf("%s: paused while a kernel runs\n", what);
        exit(1);
    }
    OK(cuMemsetD32Async(flag, 1, 1, other));
    inside_pause();
    inside_resume();
    printf("%s: sum %llu\n", what, (unsigned long long)driver_sum(block, WORK_WORDS, working));
    OK(cuMemFree(block));
    OK(cuMemFree(flag));
    OK(context_destroy(own));
}

static void detach(void)
{
    CUcontext own = NULL, again = NULL;
    note_free_bytes();
    OK(context_create(&own, 0, 0));
    OK(context_attach(&again, 0));
    make(own);
    OK(cuCtxSetCurrent(own));
    OK(context_detach(own));
    print_freed("attached");
    OK(cuCtxSetCurrent(own));
    OK(context_detach(own));
    print_left("detach");
}

/* Device 1 is watched from here, where device 0 has no context. */
static void end_primary(const char *what, bool by_reset)
{
    CUcontext second = NULL, third = NULL;
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(second));
    size_t before = driver_free_bytes();
    OK(cuMemAlloc(&made[0], BYTES));
    OK(cuMemAlloc(&made[1], 512));
    OK(cuMemsetD8(made[0], 3, BYTES));
    OK(cuCtxSynchronize());
    /* The process that pauses retains the context too. */
    inside_pause();
    inside_resume();
    OK(cuDevicePrimaryCtxRetain(&third, 1));
    OK(cuDevicePrimaryCtxRelease(1));
    OK(cuCtxSetCurrent(second));
    printf("%s: %lld bytes less are free while it is retained\n", what, (long long)before - (long long)driver_free_bytes());
    if (by_reset)
        OK(context_reset(1));
    else
        OK(cuDevicePrimaryCtxRelease(1));
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(second));
    printf("%s: %lld bytes less are free\n", what, (long long)before - (long long)driver_free_bytes());
    for (int i = 0; i < 2; i++)
        printf("%s: free of %d: %s\n", what, i, driver_error(cuMemFree(made[i])));
    OK(cuMemAlloc(&made[0], BYTES));
    OK(cuMemsetD8(made[0], 5, BYTES));
    inside_pause();
    inside_resume();
    unsigned char byte = 0;
    OK(cuMemcpyDtoH(&byte, made[0] + BYTES - 1, 1));
    printf("%s: afterwards %d\n", what, byte);
    OK(cuMemFree(made[0]));
    OK(cuDevicePrimaryCtxRelease(1));
    OK(cuCtxSetCurrent(primary));
}

static void paused(void)
{
    CUcontext own = NULL;
    note_free_bytes();
    OK(context_create(&own, 0, 0));
    make(own);
    inside_pause();
    OK(context_destroy(own));
    inside_resume();
    print_left("paused");
}

static volatile bool is_over;
/* The process joins its tenant with its first memory. */
static volatile bool has_begun;

static void *come_and_go(void *unused)
{
    while (!is_over) {
        CUcontext own = NULL;
        CUdeviceptr block = 0;
        OK(context_create(&own, 0, 0));
        OK(cuMemAlloc(&block, 4 << 20));
        OK(cuMemsetD8(block, 1, 4 << 20));
        has_begun = true;
        OK(context_destroy(own));
    }
    return unused;
}

static void storm(void)
{
    pthread_t threads[2];
    note_free_bytes();
    for (int i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, come_and_go, NULL) != 0)
            exit(1);
    while (!has_begun)
        usleep(1000);
    for (int i = 0; i < 20; i++) {
        usleep(5000);
        inside_pause();
        inside_resume();
    }
    is_over = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    print_freed("storm");
}

static volatile bool may_pass;

static void wait_until_it_may_pass(void *unused)
{
    (void)unused;
    while (!may_pass)
        usleep(1000);
}

static void *pause_in_a_thread(void *unused)
{
    inside_pause();
    return unused;
}

static void *allocate_two_in_a_thread(void *unused)
{
    CUdeviceptr *addresses = unused;
    OK(cuCtxSetCurrent(primary));
    OK(cuMemAlloc(&addresses[0], BYTES));
    OK(cuMemAlloc(&addresses[1], BYTES));
    return NULL;
}

static pthread_t begin_thread(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, body, argument) != 0)
        exit(1);
    return thread;
}

/* Each unmapping takes 300 ms. */
static void late(void)
{
    CUcontext own = NULL;
    CUstream stream = NULL, own_stream = NULL;
    CUdeviceptr kept = 0, other = 0, block = 0, next[2] = { 0, 0 };
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc(&kept, BYTES));
    note_free_bytes();
    OK(cuMemAlloc(&other, BYTES));
    OK(context_create(&own, 0, 0));
    OK(cuStreamCreate(&own_stream, 1));
    OK(cuMemAlloc(&block, BYTES));
    OK(cuMemFreeAsync(other, stream));
    OK(cuMemFreeAsync(block, own_stream));
    usleep(150000);
    /* The thread that frees behind streams is at the first block now. It comes to the second while that goes with its context. */
    OK(context_destroy(own));
    OK(cuCtxSetCurrent(primary));
    while (driver_free_bytes() < used_before)
        usleep(1000);
    usleep(600000);
    /* Memory that is wanted at the beginning of a pause comes behind it. */
    OK(cuLaunchHostFunc(stream, wait_until_it_may_pass, NULL));
    pthread_t pauses = begin_thread(pause_in_a_thread, NULL);
    usleep(300000);
    pthread_t allocates = begin_thread(allocate_two_in_a_thread, next);
    usleep(300000);
    may_pass = true;
    pthread_join(pauses, NULL);
    inside_resume();
    pthread_join(allocates, NULL);
    for (int i = 0; i < 2; i++)
        driver_fill(next[i], 4, WORDS, NULL);
    /* Another allocation offers what the driver would not free. */
    OK(cuMemAlloc(&other, BYTES));
    printf("late: a later block has %s address\n", next[0] == block || next[1] == block ? "its" : "another");
    for (int i = 0; i < 2; i++) {
        printf("late: sum %llu\n", (unsigned long long)driver_sum(next[i], WORDS, NULL));
        OK(cuMemFree(next[i]));
    }
}

static struct {
    CUcontext context;
    CUdeviceptr block;
    CUresult code;
    volatile bool is_over;
} to_free;

static void *free_in_a_thread(void *unused)
{
    OK(cuCtxSetCurrent(to_free.context));
    to_free.code = cuMemFree(to_free.block);
    to_free.is_over = true;
    return unused;
}

/* A context of the program's own works with a block, of that context or of the primary one. It is freed in another context: in the
 * primary one, or in one of device 1. */
static void free_at_work(const char *what, bool is_owner)
{
    CUcontext own = NULL;
    CUstream working = NULL, other = NULL;
    CUdeviceptr flag = 0;
    to_free.context = primary;
    if (!is_owner) {
        OK(cuDevicePrimaryCtxRetain(&to_free.context, 1));
        OK(cuMemAlloc(&to_free.block, WORK_BYTES));
    }
    OK(cuStreamCreate(&other, 1));
    OK(context_create(&own, 0, 0));
    if (is_owner)
        OK(cuMemAlloc(&to_free.block, WORK_BYTES));
    OK(cuMemAlloc(&flag, 4));
    OK(cuMemsetD8(flag, 0, 4));
    OK(cuCtxSynchronize());
    OK(cuStreamCreate(&working, 1));
    void *params[] = {&flag};
    driver_launch("spin_until_nonzero", working, params);
    driver_fill(to_free.block, 7, WORK_WORDS, working);
    pthread_t frees = begin_thread(free_in_a_thread, NULL);
    /* Too short a wait lets a wrong free pass, and never fails a right one. */
    usleep(300000);
    bool was_early = to_free.is_over;
    OK(cuMemsetD32Async(flag, 1, 1, other));
    pthread_join(frees, NULL);
    printf("%s: free %s, %s, ", what, driver_error(to_free.code), was_early ? "too early" : "after the work");
    printf("stream %s\n", driver_error(cuStreamSynchronize(working)));
    OK(cuMemFree(flag));
    OK(context_destroy(own));
}

static void captured(void)
{
    CUcontext own = NULL;
    CUstream stream = NULL;
    CUdeviceptr block = 0;
    OK(context_create(&own, 0, 0));
    OK(cuMemAlloc(&block, BYTES));
    OK(cuStreamCreate(&stream, 1));
    OK(cuStreamBeginCapture(stream, 2));
    OK(context_destroy(own));
    OK(cuCtxSetCurrent(primary));
    OK(cuMemAlloc(&block, BYTES));
    driver_fill(block, 7, WORDS, NULL);
    inside_pause();
    inside_resume();
    printf("captured: sum %llu\n", (unsigned long long)driver_sum(block, WORDS, NULL));
    OK(cuMemFree(block));
}

/* Device 1 has contexts of both kinds when it is paused first. */
static void survivor(void)
{
    CUcontext own = NULL, second = NULL;
    CUdeviceptr block = 0, other = 0;
    uint32_t word = 0;
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(second));
    OK(cuMemAlloc(&other, BYTES));
    OK(context_create(&own, 0, 1));
    OK(cuMemAlloc(&block, BYTES));
    OK(cuMemsetD8(block, 7, BYTES));
    inside_pause();
    inside_resume();
    OK(context_reset(1));
    inside_pause();
    inside_resume();
    OK(cuMemcpyDtoH(&word, block + BYTES - 4, 4));
    printf("survivor: word %x\n", word);
    OK(cuMemFree(block));
    OK(context_destroy(own));
}

static int has_primary(void)
{
    unsigned flags = 0;
    int is_active = 0;
    OK(context_state(0, &flags, &is_active));
    return is_active;
}

/* A module that was loaded in a context has ended with it, though the next one has its value. */
static int again(void)
{
    driver_load();
    look_up();
    OK(cuInit(0));
    for (int i = 0; i < 2; i++) {
        CUcontext own = NULL;
        CUdeviceptr block = 0;
        uint32_t word = 0;
        OK(context_create(&own, 0, 0));
        OK(cuMemAlloc(&block, BYTES));
        OK(cuMemsetD8(block, 7, BYTES));
        inside_pause();
        inside_resume();
        OK(cuMemcpyDtoH(&word, block + BYTES - 4, 4));
        printf("again: word %x\n", word);
        OK(context_destroy(own));
    }
    return 0;
}

static int alone(void)
{
    CUcontext own = NULL;
    CUdeviceptr block = 0;
    uint32_t word = 0;
    driver_load();
    look_up();
    OK(cuInit(0));
    OK(context_create(&own, 0, 0));
    OK(cuMemAlloc(&block, BYTES));
    driver_fill(block, 7, WORDS, NULL);
    int before = has_primary();
    size_t free_bytes = driver_free_bytes();
    inside_pause();
    int paused = has_primary();
    inside_resume();
    OK(cuMemcpyDtoH(&word, block + BYTES - 4, 4));
    printf("alone: primary context %d, %d, %d, word %u, %lld bytes less are free\n", before, paused, has_primary(), word,
        (long long)free_bytes - (long long)driver_free_bytes());
    OK(cuMemFree(block));
    OK(context_destroy(own));
    return 0;
}

int main(int count, char **words)
{
    inside_deadline(120);
    if (count == 2 && strcmp(words[1], "alone") == 0)
        return alone();
    if (count == 2 && strcmp(words[1], "again") == 0)
        return again();
    driver_start();
    look_up();
    OK(cuDevicePrimaryCtxRetain(&primary, 0));
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "destroy") == 0)
            destroy();
        else if (strcmp(words[i], "plain") == 0)
            plain();
        else if (strcmp(words[i], "work") == 0)
            work("work", context_create, end_nothing);
        else if (strcmp(words[i], "plain-work") == 0)
            work("plain-work", context_create_plain, end_nothing);
        else if (strcmp(words[i], "refused") == 0)
            work("refused", context_create, end_refused);
        else if (strcmp(words[i], "held") == 0)
            work("held", context_create, end_one_of_two);
        else if (strcmp(words[i], "owner") == 0)
            free_at_work("owner", true);
        else if (strcmp(words[i], "others") == 0)
            free_at_work("others", false);
        else if (strcmp(words[i], "captured") == 0)
            captured();
        else if (strcmp(words[i], "survivor") == 0)
            survivor();
        else if (strcmp(words[i], "detach") == 0)
            detach();
        else if (strcmp(words[i], "release") == 0)
            end_primary("release", false);
        else if (strcmp(words[i], "reset") == 0)
            end_primary("reset", true);
        else if (strcmp(words[i], "paused") == 0)
            paused();
        else if (strcmp(words[i], "storm") == 0)
            storm();
        else if (strcmp(words[i], "late") == 0)
            late();
    }
    return 0;
}
