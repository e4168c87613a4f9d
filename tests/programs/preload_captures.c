/* Plain memory is freed while a stream of the same context is captured, one word an argument:
 *
 *   meanwhile another thread captures in thread-local mode; a kernel still uses what is freed
 *   relaxed   the capturing thread frees, in relaxed mode
 *   global    another thread captures in global mode, which refuses the free
 *   thread    a capture that another thread may not end goes on
 *   meets     another thread frees all the time, while captures begin and end
 *   early     a capture is older than the process's memory, and so than its part in a tenant; older: than an attach
 *   dropped   the stream under capture ends, by the name of CUDA 2
 *   ordered   the capturing thread frees in the order of the captured stream, which no graph can do
 *
 * It prints the same with and without Sublet. */
#include "driver.h"
#include "attach.h"
#include "inside.h"

#include <pthread.h>
#include <stdbool.h>

enum { BYTES = 8 << 20, WORDS = BYTES / 4, GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

static CUcontext context;
static CUstream captured, working;
static CUdeviceptr kept, gone, flag;
static volatile bool is_freed;

static CUresult exchange_mode(int *mode)
{
    static CUresult (*exchange)(int *);
    if (exchange == NULL)
        *(void **)&exchange = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuThreadExchangeStreamCaptureMode");
    return exchange(mode);
}

/* A stream is captured from here on. */
static void begin(int mode)
{
    OK(cuStreamCreate(&captured, 1));
    OK(cuStreamCreate(&working, 1));
    OK(cuMemAlloc(&kept, BYTES));
    OK(cuMemAlloc(&gone, BYTES));
    OK(cuMemAlloc(&flag, 4));
    OK(cuMemsetD8(flag, 0, 4));
    OK(cuCtxSynchronize());
    OK(cuStreamBeginCapture(captured, mode));
    driver_fill(kept, 5, WORDS, captured);
}

static void end(const char *what)
{
    CUgraph graph = NULL;
    CUgraphExec ready = NULL;
    CUresult code = cuStreamEndCapture(captured, &graph);
    printf("%s: capture %s", what, driver_error(code));
    if (code == CU_OK) {
        OK(cuGraphInstantiate(&ready, graph, 0));
        OK(cuGraphLaunch(ready, captured));
        printf(", sum %llu", (unsigned long long)driver_sum(kept, WORDS, captured));
        OK(cuGraphExecDestroy(ready));
        OK(cuGraphDestroy(graph));
    }
    printf("\n");
    OK(cuMemFree(kept));
    OK(cuMemFree(flag));
    OK(cuStreamDestroy(captured));
    OK(cuStreamDestroy(working));
}

static void *free_gone(void *code)
{
    OK(cuCtxSetCurrent(context));
    *(CUresult *)code = cuMemFree(gone);
    is_freed = true;
    return NULL;
}

static pthread_t begin_thread(void *(*body)(void *), CUresult *code)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, body, code) != 0)
        exit(1);
    return thread;
}

/* What another thread is told by `body`. */
static CUresult by_thread(void *(*body)(void *))
{
    CUresult code = CU_OK;
    pthread_join(begin_thread(body, &code), NULL);
    return code;
}

/* A thread that captures may not wait for a stream. */
static void *wait_for_work(void *code)
{
    OK(cuCtxSetCurrent(context));
    *(CUresult *)code = cuStreamSynchronize(working);
    return NULL;
}

static void meanwhile(void)
{
    CUresult code = CU_OK;
    bool was_early;
    void *params[] = {&flag};
    begin(THREAD_LOCAL);
    /* What is freed is used once the flag is up. */
    driver_launch("spin_until_nonzero", working, params);
    driver_fill(gone, 3, WORDS, working);
    is_freed = false;
    pthread_t thread = begin_thread(free_gone, &code);
    usleep(50000);
    was_early = is_freed;
    OK(cuMemsetD32Async(flag, 1, 1, NULL));
    pthread_join(thread, NULL);
    printf("meanwhile: free %s, %s, stream %s\n", driver_error(code), was_early ? "too early" : "after the work",
        driver_error(by_thread(wait_for_work)));
    end("meanwhile");
}

static void relaxed(void)
{
    int mode = RELAXED;
    begin(THREAD_LOCAL);
    OK(exchange_mode(&mode));
    printf("relaxed thread: free %s\n", driver_error(cuMemFree(gone)));
    OK(exchange_mode(&mode));
    end("relaxed thread");
    begin(RELAXED);
    printf("relaxed capture: free %s\n", driver_error(cuMemFree(gone)));
    end("relaxed capture");
}

static void global(void)
{
    begin(GLOBAL);
    printf("global: free %s\n", driver_error(by_thread(free_gone)));
    end("global");
    printf("global: free afterwards %s\n", driver_error(cuMemFree(gone)));
}

static void *end_elsewhere(void *code)
{
    CUgraph graph = NULL;
    OK(cuCtxSetCurrent(context));
    *(CUresult *)code = cuStreamEndCapture(captured, &graph);
    return NULL;
}

static void other_thread(void)
{
    begin(THREAD_LOCAL);
    printf("thread: end elsewhere %d\n", by_thread(end_elsewhere));
    /* A capture that goes on is still in the way of a wait for its context. */
    printf("thread: free %s\n", driver_error(by_thread(free_gone)));
    end("thread");
}

static volatile bool is_over;

static void *free_all_the_time(void *unused)
{
    OK(cuCtxSetCurrent(context));
    while (!is_over) {
        CUdeviceptr block = 0;
        OK(cuMemAlloc(&block, BYTES));
        OK(cuMemFree(block));
    }
    return unused;
}

static void meets(void)
{
    enum { CAPTURES = 1000 };
    pthread_t thread = begin_thread(free_all_the_time, NULL);
    OK(cuStreamCreate(&captured, 1));
    OK(cuMemAlloc(&kept, BYTES));
    for (int i = 0; i < CAPTURES; i++) {
        CUgraph graph = NULL;
        OK(cuStreamBeginCapture(captured, RELAXED));
        driver_fill(kept, (unsigned)i, WORDS, captured);
        OK(cuStreamEndCapture(captured, &graph));
        OK(cuGraphDestroy(graph));
    }
    is_over = true;
    pthread_join(thread, NULL);
    OK(cuMemFree(kept));
    OK(cuStreamDestroy(captured));
    printf("meets: %d captures\n", CAPTURES);
}

/* A pause is refused, and leaves a capture alone that was under way before `join`. */
static void before(const char *what, unsigned flags, void (*join)(void))
{
    CUgraph graph = NULL;
    OK(cuStreamCreate(&captured, flags));
    OK(cuStreamBeginCapture(captured, RELAXED));
    join();
    OK(cuMemAlloc(&kept, BYTES));
    driver_fill(kept, 5, WORDS, captured);
    if (inside_is_paused_within(1000)) {
        printf("%s: paused in a capture\n", what);
        exit(1);
    }
    printf("%s: capture %s\n", what, driver_error(cuStreamEndCapture(captured, &graph)));
    inside_pause();
    inside_resume();
    OK(cuStreamDestroy(captured));
}

static void join_by_memory(void)
{
}

static void join_by_attach(void)
{
    attach_if_asked();
    driver_load();
}

static void dropped(void)
{
    CUresult (*destroy)(CUstream) = (CUresult(*)(CUstream))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamDestroy");
    OK(cuMemAlloc(&kept, BYTES));
    OK(cuStreamCreate(&captured, 1));
    OK(cuStreamBeginCapture(captured, RELAXED));
    OK(destroy(captured));
    inside_pause();
    inside_resume();
    printf("dropped: free %s\n", driver_error(cuMemFree(kept)));
}

/* Plain memory is no graph's to free. It stays, and the graph uses it. */
static void ordered(void)
{
    begin(RELAXED);
    driver_fill(gone, 3, WORDS, captured);
    printf("ordered: free %s\n", driver_error(cuMemFreeAsync(gone, captured)));
    end("ordered");
    printf("ordered: sum %llu\n", (unsigned long long)driver_sum(gone, WORDS, NULL));
    printf("ordered: free afterwards %s\n", driver_error(cuMemFree(gone)));
}

int main(int count, char **words)
{
    inside_deadline(120);
    driver_start();
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "meanwhile") == 0)
            meanwhile();
        else if (strcmp(words[i], "relaxed") == 0)
            relaxed();
        else if (strcmp(words[i], "global") == 0)
            global();
        else if (strcmp(words[i], "thread") == 0)
            other_thread();
        else if (strcmp(words[i], "early") == 0)
            before("early", 1, join_by_memory);
        else if (strcmp(words[i], "older") == 0)
            before("older", 0, join_by_attach);
        else if (strcmp(words[i], "dropped") == 0)
            dropped();
        else if (strcmp(words[i], "ordered") == 0)
            ordered();
        else if (strcmp(words[i], "meets") == 0)
            meets();
    }
    return 0;
}
