// Graphs that are made, cloned, updated and destroyed by many threads simultaneously, each with its own stream and words.
//
// A step of a thread captures one kernel, instantiates a clone of the graph, launches it, updates it from a second capture
// with other factors, launches it again, and runs a third graph that has its memory from nodes of its own. All words of a
// buffer are one number, so the host knows what must come out. Driver calls alone; the file that loads this gives the PTX.

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS_MAX = 64, GRID = 64, BLOCK = 256, CAPTURE_THREAD_LOCAL = 1, NON_BLOCKING = 1 };

#define FUNCTIONS(_)                                                                                                   \
    _(cuCtxSetCurrent, (void *))                                                                                       \
    _(cuModuleLoadData, (void **, const void *))                                                                       \
    _(cuModuleGetFunction, (void **, void *, const char *))                                                            \
    _(cuMemAlloc_v2, (uint64_t *, size_t))                                                                             \
    _(cuStreamCreate, (void **, unsigned))                                                                             \
    _(cuStreamBeginCapture_v2, (void *, int))                                                                          \
    _(cuStreamEndCapture, (void *, void **))                                                                           \
    _(cuStreamSynchronize, (void *))                                                                                   \
    _(cuGraphClone, (void **, void *))                                                                                 \
    _(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                                              \
    _(cuGraphExecUpdate_v2, (void *, void *, void *))                                                                  \
    _(cuGraphLaunch, (void *, void *))                                                                                 \
    _(cuGraphDestroy, (void *))                                                                                        \
    _(cuGraphExecDestroy, (void *))                                                                                    \
    _(cuMemAllocAsync, (uint64_t *, size_t, void *))                                                                   \
    _(cuMemFreeAsync, (uint64_t, void *))                                                                              \
    _(cuMemcpyDtoDAsync_v2, (uint64_t, uint64_t, size_t, void *))                                                      \
    _(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *))                                                        \
    _(cuMemsetD32Async, (uint64_t, unsigned, size_t, void *))                                                          \
    _(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))

#define DECLARE(name, arguments) static int (*name) arguments;
FUNCTIONS(DECLARE)

struct worker {
    unsigned index, number;
    void *stream;
    uint64_t words;
    uint32_t *host;
    uint64_t value;
    char failure[200];
};

static struct worker workers[THREADS_MAX];
static unsigned thread_count;
static size_t word_count;
static void *context, *kernel;

// Leaves the function with what failed when a call does.
#define CALL(worker, name, ...)                                                                                        \
    do {                                                                                                               \
        const int code = name(__VA_ARGS__);                                                                            \
        if (code != 0) {                                                                                               \
            snprintf((worker)->failure, sizeof (worker)->failure, "thread %u, step %u: %s returned %d",                \
                     (worker)->index, (worker)->number, #name, code);                                                  \
            return 0;                                                                                                  \
        }                                                                                                              \
    } while (0)

// words[i] = words[i] * mul + add, on the worker's stream.
static int affine(struct worker *w, uint64_t words, uint32_t mul, uint32_t add) {
    uint64_t count = word_count;
    void *arguments[] = {&words, &mul, &add, &count};
    CALL(w, cuLaunchKernel, kernel, GRID, 1, 1, BLOCK, 1, 1, 0, w->stream, arguments, NULL);
    return 1;
}

static int captured(struct worker *w, uint32_t mul, uint32_t add, void **graph) {
    CALL(w, cuStreamBeginCapture_v2, w->stream, CAPTURE_THREAD_LOCAL);
    if (!affine(w, w->words, mul, add)) return 0;
    CALL(w, cuStreamEndCapture, w->stream, graph);
    return 1;
}

// A graph that takes memory, works there, and gives it back.
static int with_memory_nodes(struct worker *w, uint32_t mul, uint32_t add) {
    void *graph = NULL, *executable = NULL;
    uint64_t passing = 0;
    const size_t size = word_count * sizeof(uint32_t);
    CALL(w, cuStreamBeginCapture_v2, w->stream, CAPTURE_THREAD_LOCAL);
    CALL(w, cuMemAllocAsync, &passing, size, w->stream);
    CALL(w, cuMemcpyDtoDAsync_v2, passing, w->words, size, w->stream);
    if (!affine(w, passing, mul, add)) return 0;
    CALL(w, cuMemcpyDtoDAsync_v2, w->words, passing, size, w->stream);
    CALL(w, cuMemFreeAsync, passing, w->stream);
    CALL(w, cuStreamEndCapture, w->stream, &graph);
    CALL(w, cuGraphInstantiateWithFlags, &executable, graph, 0);
    CALL(w, cuGraphLaunch, executable, w->stream);
    CALL(w, cuGraphLaunch, executable, w->stream);
    CALL(w, cuStreamSynchronize, w->stream);
    CALL(w, cuGraphExecDestroy, executable);
    CALL(w, cuGraphDestroy, graph);
    return 1;
}

static int work(struct worker *w) {
    const uint32_t mul = 2 * w->number + 3, add = w->number + w->index;
    uint32_t expected = w->number * 2654435761u + w->index;
    void *graph = NULL, *clone = NULL, *other = NULL, *executable = NULL;
    uint64_t info[4] = {0};
    CALL(w, cuCtxSetCurrent, context);
    if (!captured(w, mul, add, &graph) || !captured(w, mul + 2, add + 1, &other)) return 0;
    CALL(w, cuGraphClone, &clone, graph);
    CALL(w, cuGraphDestroy, graph);
    CALL(w, cuGraphInstantiateWithFlags, &executable, clone, 0);
    CALL(w, cuGraphDestroy, clone);
    CALL(w, cuMemsetD32Async, w->words, expected, word_count, w->stream);
    CALL(w, cuGraphLaunch, executable, w->stream);
    expected = expected * mul + add;
    CALL(w, cuGraphExecUpdate_v2, executable, other, info);
    CALL(w, cuGraphDestroy, other);
    for (int again = 0; again < 2; again++) {
        CALL(w, cuGraphLaunch, executable, w->stream);
        expected = expected * (mul + 2) + add + 1;
    }
    if (!with_memory_nodes(w, mul, add)) return 0;
    for (int again = 0; again < 2; again++) expected = expected * mul + add;
    CALL(w, cuMemcpyDtoHAsync_v2, w->host, w->words, word_count * sizeof(uint32_t), w->stream);
    CALL(w, cuStreamSynchronize, w->stream);
    CALL(w, cuGraphExecDestroy, executable);
    for (size_t i = 0; i < word_count; i++) {
        if (w->host[i] != expected) {
            snprintf(w->failure, sizeof w->failure, "thread %u, step %u: word %zu is %#x, not %#x", w->index, w->number, i,
                     w->host[i], expected);
            return 0;
        }
    }
    w->value = expected;
    return 1;
}

static void *run(void *given) {
    work(given);
    return NULL;
}

// Opens the driver for `threads` threads with `words` words each, in `current`, a context whose module has the kernel.
// Null, or what failed.
const char *graph_threads_open(void *current, void *function, unsigned threads, size_t words) {
    static char failure[200];
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) return "libcuda.so.1 is not here";
#define FIND(name, arguments)                                                                                          \
    *(void **)&name = dlsym(driver, #name);                                                                            \
    if (name == NULL) return "the driver has no " #name;
    FUNCTIONS(FIND)
    context = current, kernel = function, thread_count = threads, word_count = words;
    for (unsigned i = 0; i < threads && i < THREADS_MAX; i++) {
        struct worker *w = &workers[i];
        w->index = i;
        w->host = malloc(words * sizeof(uint32_t));
        if (w->host == NULL) return "no host memory";
        const int made = cuMemAlloc_v2(&w->words, words * sizeof(uint32_t));
        const int code = made != 0 ? made : cuStreamCreate(&w->stream, NON_BLOCKING);
        if (code != 0) {
            snprintf(failure, sizeof failure, "thread %u: no memory or no stream: %d", i, code);
            return failure;
        }
    }
    return NULL;
}

// One step of all threads; *value is the sum of what they have. Null, or what failed.
const char *graph_threads_step(unsigned number, uint64_t *value) {
    pthread_t threads[THREADS_MAX];
    for (unsigned i = 0; i < thread_count; i++) {
        workers[i].number = number;
        if (pthread_create(&threads[i], NULL, run, &workers[i]) != 0) return "no thread";
    }
    *value = 0;
    const char *failure = NULL;
    for (unsigned i = 0; i < thread_count; i++) {
        pthread_join(threads[i], NULL);
        *value += workers[i].value;
        if (workers[i].failure[0] != 0) failure = workers[i].failure;
    }
    return failure;
}
