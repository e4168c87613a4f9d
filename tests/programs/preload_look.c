/* Uses of paged memory that nobody announces, seen by what calls name:
 *
 *   preload_look random SEED THREADS PAUSES   kernels, copies and fills over more memory than the frames have; each byte is compared.
 *                                             With an odd seed all of it is a region's
 *   preload_look cases                        what is refused, what a graph uses, what is not seen
 *   preload_look region                       memory of a region that is paged, as cuMemAlloc gives it
 *   preload_look contexts                     the same memory, used in two contexts by turns
 *   preload_look windows                      memory of two windows, used by one call
 *   preload_look handle                       the same memory, which a network card has
 *
 * Kernels are given addresses as they are, inside of structures, and several in one. */
#include "at_random.h"
#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sublet.h>
#include <sys/mman.h>

enum { CHUNK = 2 << 20, FRAMES = 5, SPANS = 5, STREAMS = 2, THREADS_MAX = 4, OPS = 120, WORDS_MAX = 4096, OUT_OF_MEMORY = 2, ILLEGAL_ADDRESS = 700, GLOBAL = 0 };

/* As the simulated kernels have them. */
typedef struct {
    uint32_t before, value;
    uint64_t count;
    CUdeviceptr dst;
    uint64_t after;
} Filled;
typedef struct {
    CUdeviceptr places[8];
    uint64_t count;
    uint32_t lists, after;
} Each;

typedef struct {
    uint64_t start;
    size_t bytes;
    /* What must be there, and the stream of the last use. */
    uint32_t *words;
    int stream;
} Span;

typedef struct {
    uint64_t random, pager;
    int is_region;
    CUcontext context;
    CUstream streams[STREAMS];
    CUevent events[STREAMS];
    Span spans[SPANS];
    uint32_t buffer[OPS][WORDS_MAX];
} Worker;

static CUfunction fill, fill_struct, add_each, affine, fill_behind;
static char text[1 << 12];

static unsigned draw(Worker *worker, unsigned below)
{
    return random_below(&worker->random, below);
}

static void launch(CUfunction function, CUstream stream, void **params)
{
    OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
}

static size_t some_words(Worker *worker, const Span *span, size_t *count)
{
    *count = 1 + draw(worker, WORDS_MAX);
    return draw(worker, (unsigned)(span->bytes / 4 - *count));
}

/* Has the stream of this number come behind the last use of the span. */
static void come_behind(Worker *worker, Span *span, int stream)
{
    if (span->stream != stream) {
        OK(cuEventRecord(worker->events[span->stream], worker->streams[span->stream]));
        OK(cuStreamWaitEvent(worker->streams[stream], worker->events[span->stream], 0));
    }
    span->stream = stream;
}

/* Addresses for a span, which begins with any bytes. */
static void give(Worker *worker, Span *span)
{
    if (worker->is_region) {
        sublet_region_begin("spans", SUBLET_CONTENTS_KEEP);
        OK(cuMemAlloc(&span->start, span->bytes));
        sublet_region_end();
    } else if (sublet_page_alloc(worker->pager, span->bytes, &span->start) != 0)
        exit(1);
}

static void look_at(Worker *worker, const Span *span, size_t at, size_t count, const uint32_t *found)
{
    if (memcmp(found, span->words + at, count * 4) != 0) {
        printf("span %td of %zu bytes: words from %zu are not as they were written\n", span - worker->spans, span->bytes, at);
        exit(1);
    }
}

static void use(Worker *worker, int round)
{
    int number = (int)draw(worker, STREAMS);
    CUstream stream = worker->streams[number];
    Span *span = &worker->spans[draw(worker, SPANS)], *other = &worker->spans[draw(worker, SPANS)];
    size_t count = 0, at = some_words(worker, span, &count);
    CUdeviceptr place = span->start + 4 * at;
    uint32_t value = draw(worker, 1u << 30), mul = 3;
    uint32_t *buffer = worker->buffer[round];
    uint64_t many = count;
    come_behind(worker, span, number);
    switch (draw(worker, 8)) {
    case 0: {
        void *params[] = {&place, &value, &many};
        struct {
            uint64_t place;
            uint32_t value;
            uint64_t many;
        } together = {place, value, many};
        size_t bytes = sizeof together;
        /* CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END. */
        void *extra[] = {(void *)1, &together, (void *)2, &bytes, NULL};
        OK(cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, stream, round % 2 ? NULL : params, round % 2 ? extra : NULL));
        for (size_t i = 0; i < count; i++)
            span->words[at + i] = value;
        break;
    }
    case 1: {
        Filled filled = {7, value, count, place, 9};
        void *params[] = {&filled};
        launch(fill_struct, stream, params);
        for (size_t i = 0; i < count; i++)
            span->words[at + i] = value;
        break;
    }
    case 2: {
        size_t less = 0, there = some_words(worker, other, &less);
        less = less < count ? less : count;
        come_behind(worker, other, number);
        Each each = {{place, other->start + 4 * there}, less, 2, 0};
        void *params[] = {&each, &value};
        launch(add_each, stream, params);
        for (size_t i = 0; i < less; i++)
            span->words[at + i] += value;
        for (size_t i = 0; i < less; i++)
            other->words[there + i] += value;
        break;
    }
    case 3:
        OK(cuMemsetD32Async(place, value, count, stream));
        for (size_t i = 0; i < count; i++)
            span->words[at + i] = value;
        break;
    case 4:
        for (size_t i = 0; i < count; i++)
            span->words[at + i] = buffer[i] = value + (uint32_t)i;
        OK(cuMemcpyHtoDAsync(place, buffer, count * 4, stream));
        break;
    case 5: {
        size_t less = 0, from = some_words(worker, other, &less);
        less = less < count ? less : count;
        if (other == span)
            break;
        come_behind(worker, other, number);
        OK(cuMemcpyDtoDAsync(place, other->start + 4 * from, less * 4, stream));
        memcpy(span->words + at, other->words + from, less * 4);
        break;
    }
    case 6: {
        void *params[] = {&place, &mul, &value, &many};
        CUlaunch config = {{1, 1, 1}, {32, 1, 1}, 0, stream, NULL, 0};
        OK(cuLaunchKernelEx(&config, affine, params, NULL));
        for (size_t i = 0; i < count; i++)
            span->words[at + i] = span->words[at + i] * mul + value;
        break;
    }
    default:
        OK(cuMemcpyDtoHAsync(buffer, place, count * 4, stream));
        OK(cuStreamSynchronize(stream));
        look_at(worker, span, at, count, buffer);
        if (draw(worker, 8) == 0) {
            /* The next stream may have the value of this one. */
            OK(cuStreamDestroy(worker->streams[number]));
            OK(cuStreamCreate(&worker->streams[number], 1));
        }
        if (worker->is_region && draw(worker, 4) == 0) {
            /* The other stream may use it, or what shares its chunks. */
            OK(cuMemFree(span->start));
            give(worker, span);
            OK(cuMemsetD32Async(span->start, value, span->bytes / 4, stream));
            for (size_t i = 0; i < span->bytes / 4; i++)
                span->words[i] = value;
        }
    }
    if (draw(worker, 6) == 0)
        sublet_page_announce(worker->pager, &other->start, 1);
}

static void *work(void *argument)
{
    Worker *worker = argument;
    OK(cuCtxSetCurrent(worker->context));
    for (int i = 0; i < OPS; i++)
        use(worker, i);
    for (int i = 0; i < STREAMS; i++)
        OK(cuStreamSynchronize(worker->streams[i]));
    uint32_t *found = malloc(2 * CHUNK);
    for (int i = 0; i < SPANS && found != NULL; i++) {
        Span *span = &worker->spans[i];
        OK(cuMemcpyDtoH(found, span->start, span->bytes));
        look_at(worker, span, 0, span->bytes / 4, found);
    }
    free(found);
    return NULL;
}

static uint64_t look_for(uint64_t frames)
{
    uint64_t pager = 0;
    if (sublet_page_open(0, 64 * (uint64_t)CHUNK, CHUNK, frames * CHUNK, &pager) != 0) {
        printf("no pager: %s\n", sublet_last_error());
        exit(1);
    }
    return pager;
}

static long figure(uint64_t pager, const char *name)
{
    sublet_page_json(pager, text, sizeof text);
    const char *found = strstr(text, name);
    return found == NULL ? -1 : atol(found + strlen(name));
}

static int at_random(uint64_t seed, int threads, int pauses)
{
    uint64_t pager = look_for(FRAMES);
    if (seed % 2 == 1 && sublet_page_region(pager, "spans") != 0)
        exit(1);
    Worker *workers = calloc((size_t)threads, sizeof *workers);
    pthread_t running[THREADS_MAX];
    CUcontext context = NULL;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    for (int t = 0; t < threads; t++) {
        Worker *worker = &workers[t];
        worker->random = seed * 31 + (uint64_t)t;
        worker->pager = pager;
        worker->context = context;
        worker->is_region = (int)(seed % 2);
        for (int i = 0; i < STREAMS; i++) {
            OK(cuStreamCreate(&worker->streams[i], 1));
            OK(cuEventCreate(&worker->events[i], 2));
        }
        for (int i = 0; i < SPANS; i++) {
            Span *span = &worker->spans[i];
            /* Some share a chunk with the next. */
            span->bytes = CHUNK / 2 * (size_t)(1 + i % 3);
            span->words = calloc(span->bytes, 1);
            give(worker, span);
            OK(cuMemsetD32Async(span->start, 0, span->bytes / 4, worker->streams[0]));
        }
    }
    for (int t = 0; t < threads; t++)
        if (pthread_create(&running[t], NULL, work, &workers[t]) != 0)
            exit(1);
    pause_at_random(seed, pauses);
    for (int t = 0; t < threads; t++)
        pthread_join(running[t], NULL);
    printf("all as written; calls %d, misses %d, exchanges %d, more than there was room for %d\n", figure(pager, "\"calls\":") > 0,
           figure(pager, "\"misses\":") > 0, figure(pager, "\"exchanges\":") > 0,
           figure(pager, "\"resident_bytes\":") > FRAMES * (long)CHUNK);
    if (seed % 2 == 0)
        return sublet_page_close(pager);
    int refused = sublet_page_close(pager) != 0;
    for (int t = 0; t < threads; t++)
        for (int i = 0; i < SPANS; i++)
            OK(cuMemFree(workers[t].spans[i].start));
    return refused ? sublet_page_close(pager) : 1;
}

static int cases(void)
{
    uint64_t pager = look_for(2), spans[4] = {0}, count = 4;
    uint32_t value = 7, found = 0;
    CUstream stream = NULL;
    CUdeviceptr list = 0;
    for (int i = 0; i < 4; i++)
        if (sublet_page_alloc(pager, CHUNK, &spans[i]) != 0)
            exit(1);
    OK(cuStreamCreate(&stream, 1));
    /* Three spans of two frames. */
    Each each = {{spans[0], spans[1], spans[2]}, count, 3, 0};
    void *of_each[] = {&each, &value};
    CUresult code = cuLaunchKernel(add_each, 1, 1, 1, 32, 1, 1, 0, stream, of_each, NULL);
    sublet_stats_json(text, sizeof text);
    printf("too many %d\n", code == OUT_OF_MEMORY);
    /* What is captured stays, though it was away: such a capture forbids its thread to wait for events. Uses before, by the same
     * stream, end all the same: their event is no part of the graph. */
    for (int i = 0; i < 3; i++) {
        void *params[] = {&spans[i], &value, &count};
        launch(fill, stream, params);
    }
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    void *of_fill[] = {&spans[0], &value, &count};
    OK(cuStreamBeginCapture(stream, GLOBAL));
    launch(fill, stream, of_fill);
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 3; round++) {
        for (int i = 1; i < 4; i++) {
            void *params[] = {&spans[i], &value, &count};
            launch(fill, stream, params);
        }
        OK(cuGraphLaunch(executable, stream));
        OK(cuStreamSynchronize(stream));
    }
    OK(cuMemcpyDtoH(&found, spans[0] + 12, 4));
    printf("replayed %d\n", found == value);
    /* The thread's own stream, which has the same value for all threads. */
    CUresult (*own)(CUdeviceptr, unsigned, size_t, CUstream) = NULL;
    own = (CUresult(*)(CUdeviceptr, unsigned, size_t, CUstream))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemsetD32Async_ptsz");
    for (int i = 1; i < 4 && own != NULL; i++)
        OK(own(spans[i], 9, 4, NULL));
    OK(cuCtxSynchronize());
    OK(cuMemcpyDtoH(&found, spans[1], 4));
    printf("own stream %d\n", own != NULL && found == 9);
    /* An address that lies in device memory is not seen: an illegal access, and no wrong bytes. */
    OK(cuMemAlloc(&list, 8));
    OK(cuMemcpyHtoD(list, &spans[1], 8));
    for (int i = 2; i < 4; i++) {
        void *params[] = {&spans[i], &value, &count};
        launch(fill, stream, params);
    }
    OK(cuStreamSynchronize(stream));
    void *of_behind[] = {&list, &value, &count};
    launch(fill_behind, stream, of_behind);
    printf("not seen %d\n", cuStreamSynchronize(stream) == ILLEGAL_ADDRESS);
    return 0;
}

static CUdeviceptr allocated(size_t bytes)
{
    CUdeviceptr made = 0;
    OK(cuMemAlloc(&made, bytes));
    return made;
}

static int is_range(CUdeviceptr memory, size_t bytes)
{
    CUdeviceptr base = 0, start = 0;
    size_t size = 0, range = 0;
    int type = 0, device = -1, names[] = {11, 12, CU_POINTER_MEMORY_TYPE, CU_POINTER_DEVICE_ORDINAL};
    void *values[] = {&start, &range, &type, &device};
    OK(cuMemGetAddressRange(&base, &size, memory + 100));
    OK(cuPointerGetAttributes(4, names, values, memory + 100));
    return base == memory && size == bytes && start == memory && range == bytes && type == 2 && device == 0;
}

extern CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr start, size_t bytes, int kind, unsigned long long flags);

enum { BLOCKS = 4, BLOCK = 3 * CHUNK / 2, INVALID = 1 };

/* Do all have what was written, and are they as large as was requested, wherever they are? */
static int are_right(const CUdeviceptr *blocks)
{
    uint32_t found = 0;
    int right = 0;
    for (int i = 0; i < BLOCKS; i++) {
        right += is_range(blocks[i], BLOCK);
        OK(cuMemcpyDtoH(&found, blocks[i] + BLOCK - 4, 4));
        right += found == (uint32_t)(70 + i);
    }
    return right;
}

/* Each with the value that `are_right` looks for. */
static void fill_each(CUdeviceptr *blocks, CUstream stream)
{
    uint64_t count = BLOCK / 4;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint32_t value = 70 + i;
        void *params[] = {&blocks[i], &value, &count};
        launch(fill, stream, params);
    }
}

static int region(void)
{
    uint64_t pager = look_for(3), other = 0, count = BLOCK / 4;
    CUdeviceptr blocks[BLOCKS];
    CUstream stream = NULL;
    CUipcMemHandle handle;
    OK(cuStreamCreate(&stream, 1));
    if (sublet_page_open(0, 64 * (uint64_t)CHUNK, CHUNK, CHUNK, &other) != 0)
        return 1;
    int kept = sublet_page_region(pager, "base");
    int twice = sublet_page_region(pager, "base"), policy = sublet_region_begin("base", SUBLET_CONTENTS_DISCARD);
    printf("paged %d, twice %d, other policy %d\n", kept, twice != 0, policy != 0);
    size_t before = driver_free_bytes();
    sublet_region_begin("base", SUBLET_CONTENTS_KEEP);
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = allocated(BLOCK);
    printf("takes %zu", before - driver_free_bytes());
    CUdeviceptr small = allocated(512);
    sublet_region_end();
    CUdeviceptr outside = allocated(BLOCK);
    printf(", in reach %d, outside %d\n", is_range(blocks[3], BLOCK), outside < blocks[0] || outside >= blocks[0] + 64 * (uint64_t)CHUNK);
    OK(cuMemFree(small));
    fill_each(blocks, stream);
    OK(cuStreamSynchronize(stream));
    int right = are_right(blocks);
    int resident = figure(pager, "\"resident_bytes\":") <= 3 * CHUNK && figure(pager, "\"misses\":") > 0;
    inside_pause();
    int away = is_range(blocks[0], BLOCK);
    inside_resume();
    printf("right %d, within frames %d, paused %d, right %d\n", right, resident, away, are_right(blocks));
    printf("not shared %d, inside %d", cuIpcGetMemHandle(&handle, blocks[0]) != CU_OK, cuMemFree(blocks[1] + 512) == INVALID);
    OK(cuMemFree(blocks[1]));
    printf(", twice %d\n", cuMemFree(blocks[1]) == INVALID);
    /* Its stream still writes it. */
    uint32_t value = 9, found = 0;
    void *params[] = {&blocks[2], &value, &count};
    launch(fill, stream, params);
    OK(cuMemFreeAsync(blocks[2], stream));
    sublet_region_begin("base", SUBLET_CONTENTS_KEEP);
    blocks[1] = allocated(BLOCK);
    blocks[2] = allocated(BLOCK);
    for (uint32_t i = 1; i < 3; i++)
        OK(cuMemsetD32Async(blocks[i], 70 + i, count, stream));
    OK(cuStreamSynchronize(stream));
    printf("again %d", are_right(blocks));
    /* As much as the window has no room for. */
    CUdeviceptr none = 0;
    printf(", too much %d", cuMemAlloc(&none, 65 * (size_t)CHUNK) == OUT_OF_MEMORY);
    for (int i = 0; i < BLOCKS; i++)
        OK(cuMemFree(blocks[i]));
    /* Their memory goes when uses are over. */
    while (figure(pager, "\"paged_bytes\":") > 0)
        usleep(1000);
    printf(", closed %d", sublet_page_close(pager) + sublet_page_close(other));
    before = driver_free_bytes();
    none = allocated(BLOCK);
    OK(cuMemsetD8(none, 1, BLOCK));
    OK(cuMemcpyDtoH(&found, none, 4));
    printf(", ordinary %d\n", before - driver_free_bytes() >= BLOCK && found == 0x01010101);
    return sublet_region_end();
}

/* What a network card is given lies there still when others have been through all other frames. */
static int handle(void)
{
    enum { PAGE = 4096, DMA_BUF = 1 };
    uint64_t pager = look_for(3), count = BLOCK / 4;
    CUdeviceptr blocks[BLOCKS];
    int fd = -1, sublet = sublet_page_region(pager, "base");
    sublet_region_begin("base", SUBLET_CONTENTS_KEEP);
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = allocated(BLOCK);
    fill_each(blocks, NULL);
    int made = cuMemGetHandleForAddressRange(&fd, blocks[0], PAGE, DMA_BUF, 0);
    if (made != CU_OK) {
        printf("refused %d\n", made);
        return 1;
    }
    volatile uint32_t *seen = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    printf("paged %d, shows %u", sublet, seen[0]);
    uint32_t value = 90;
    void *params[] = {&blocks[0], &value, &count};
    launch(fill, NULL, params);
    for (int round = 0; round < 4; round++) {
        for (int i = 1; i < BLOCKS; i++)
            OK(cuMemsetD32Async(blocks[i], (uint32_t)(70 + i), count, NULL));
        printf(", %u", seen[0]);
    }
    printf(", stays %ld\n", figure(pager, "\"stays_bytes\":") / CHUNK);
    return 0;
}

/* A call whose use of one window has not ended keeps the only frame there. */
static int windows(void)
{
    enum { WAIT_MS = 10000 };
    uint64_t pagers[2] = {look_for(1), look_for(1)}, spans[2][2] = {{0}}, count = 4;
    uint32_t value = 7, found = 0;
    CUstream stream = NULL;
    OK(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 4; i++)
        if (sublet_page_alloc(pagers[i / 2], CHUNK, &spans[i / 2][i % 2]) != 0)
            exit(1);
    Each each = {{spans[0][0], spans[1][0]}, count, 2, 0};
    void *params[] = {&each, &value};
    launch(add_each, stream, params);
    int late = sublet_page_flush(pagers[0], WAIT_MS) + sublet_page_flush(pagers[1], WAIT_MS), right = 0;
    for (int i = 0; i < 2 && late == 0; i++) {
        OK(cuMemsetD32Async(spans[i][1], 9, count, stream));
        OK(cuStreamSynchronize(stream));
        OK(cuMemcpyDtoH(&found, spans[i][0] + 12, 4));
        right += found == value;
    }
    printf("late %d, right %d\n", late, right);
    return late == 0 ? sublet_page_close(pagers[0]) + sublet_page_close(pagers[1]) : 0;
}

static atomic_int may_pass;

static void wait_until_it_may_pass(void *unused)
{
    (void)unused;
    while (!atomic_load(&may_pass))
        usleep(1000);
}

static void *let_pass_soon(void *unused)
{
    usleep(200000);
    atomic_store(&may_pass, 1);
    return unused;
}

static int contexts(void)
{
    CUresult (*create)(CUcontext *, unsigned, CUdevice) = NULL, (*destroy)(CUcontext) = NULL;
    create = (CUresult(*)(CUcontext *, unsigned, CUdevice))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxCreate_v2");
    destroy = (CUresult(*)(CUcontext))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxDestroy_v2");
    CUcontext both[2] = {NULL, NULL};
    CUstream streams[2] = {NULL, NULL};
    uint64_t pager = look_for(2), spans[4] = {0};
    OK(cuDevicePrimaryCtxRetain(&both[0], 0));
    OK(create(&both[1], 0, 0));
    for (int i = 0; i < 2; i++) {
        OK(cuCtxSetCurrent(both[i]));
        OK(cuStreamCreate(&streams[i], 1));
    }
    for (int i = 0; i < 4; i++)
        if (sublet_page_alloc(pager, CHUNK, &spans[i]) != 0)
            exit(1);
    int right = 0;
    for (uint32_t round = 0; round < 16; round++) {
        uint32_t found = 0, value = 100 + round;
        uint64_t span = spans[round % 4];
        int first = (int)(round / 2 % 2);
        /* A stream of the one context, then the default stream of the other, which has the same value for both. */
        OK(cuCtxSetCurrent(both[first]));
        OK(cuMemsetD32Async(span, value, CHUNK / 4, round % 3 == 0 ? NULL : streams[first]));
        OK(cuCtxSynchronize());
        OK(cuCtxSetCurrent(both[1 - first]));
        OK(cuMemcpyDtoH(&found, span + CHUNK - 4, 4));
        right += found == value;
        if (round % 5 == 4) {
            inside_pause();
            inside_resume();
        }
    }
    printf("right %d, exchanges %d, stays %ld", right, figure(pager, "\"exchanges\":") > 4, figure(pager, "\"stays_bytes\":"));
    /* A call there returns when its work has ended. */
    pthread_t opening;
    OK(cuCtxSetCurrent(both[1]));
    OK(cuLaunchHostFunc(streams[1], wait_until_it_may_pass, NULL));
    if (pthread_create(&opening, NULL, let_pass_soon, NULL) != 0)
        exit(1);
    OK(cuMemsetD32Async(spans[0], 7, 4, streams[1]));
    printf(", waited for %d", atomic_load(&may_pass));
    pthread_join(opening, NULL);
    /* Its uses end with it. */
    OK(cuMemsetD32Async(spans[0], 7, 4, streams[1]));
    OK(destroy(both[1]));
    OK(cuCtxSetCurrent(both[0]));
    for (int i = 1; i < 4; i++)
        OK(cuMemsetD32Async(spans[i], 7, 4, streams[0]));
    OK(cuStreamSynchronize(streams[0]));
    uint32_t found = 0;
    OK(cuMemcpyDtoH(&found, spans[0], 4));
    printf(", behind its end %d\n", found == 7);
    return sublet_page_close(pager);
}

int main(int argc, char **argv)
{
    inside_deadline(150);
    driver_start();
    fill = driver_kernel("fill_u32");
    fill_struct = driver_kernel("fill_struct_u32");
    add_each = driver_kernel("add_each_u32");
    affine = driver_kernel("affine_u32");
    fill_behind = driver_kernel("fill_behind_u32");
    if (argc == 5 && strcmp(argv[1], "random") == 0)
        return at_random(strtoull(argv[2], NULL, 10), atoi(argv[3]), atoi(argv[4]));
    if (argc == 2 && strcmp(argv[1], "contexts") == 0)
        return contexts();
    if (argc == 2 && strcmp(argv[1], "handle") == 0)
        return handle();
    if (argc == 2 && strcmp(argv[1], "windows") == 0)
        return windows();
    return argc == 2 && strcmp(argv[1], "region") == 0 ? region() : cases();
}
