/* Calls about memory that is away by tag, or that lies next to it, one word an argument:
 *
 *   reach     calls that begin in memory that is there and reach into what is away, or name that and do not reach it
 *   nothing   calls about no bytes, which need no memory
 *   index     where a batch that is refused says which of its copies failed
 *   captured  a capture by another thread, in global mode, lives while calls about other streams are refused
 *   across    a copy between devices is captured
 *   always    one thread copies while another one has the memory leave and come back
 *
 * Two allocations lie behind each other, and the second has the tag. */
#include "copies.h"
#include "driver.h"
#include "inside.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sublet.h>

enum { BYTES = 4 << 20, NEAR = 512, ROW = 256, NOT_PERMITTED = 800, HOST = 1, DEVICE = 2, ROUNDS = 20 };

typedef struct {
    unsigned kind, flags, reduction, type;
    CUdeviceptr address;
    uint64_t value, alias, rest;
} Reduction;

static CUcontext context;
static CUstream stream;
/* What is there, and behind it what leaves. */
static CUdeviceptr near, away;
static unsigned char host[8 * ROW];
static atomic_int is_over, right, wrong;

static void *found(const char *name)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);
    if (symbol == NULL)
        symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    if (symbol == NULL) {
        printf("there is no %s\n", name);
        exit(1);
    }
    return symbol;
}

static void by_tag(const char *name)
{
    typedef int (*ByTag)(const char *, const char *const *, size_t, int, uint32_t);
    const char *tags[] = {"weights"};
    int code = ((ByTag)found(name))(NULL, tags, 1, SUBLET_WHOSE_PROCESS, 0);
    if (code != 0) {
        printf("%s: %d\n", name, code);
        exit(1);
    }
}

static void begin(void)
{
    CUprop prop = driver_prop();
    CUhandle first = 0, second = 0;
    CUaccess access = {{1, 0}, 3};
    driver_start();
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAddressReserve(&near, 2 * BYTES, 0, 0, 0));
    away = near + BYTES;
    OK(cuMemCreate(&first, BYTES, &prop, 0));
    ((int (*)(const char *, int))found("sublet_region_begin"))("weights", SUBLET_CONTENTS_KEEP);
    OK(cuMemCreate(&second, BYTES, &prop, 0));
    ((int (*)(void))found("sublet_region_end"))();
    OK(cuMemMap(near, BYTES, 0, first, 0));
    OK(cuMemMap(away, BYTES, 0, second, 0));
    OK(cuMemSetAccess(near, 2 * BYTES, &access, 1));
    OK(cuMemsetD8(near, 5, 2 * BYTES));
    OK(cuCtxSynchronize());
    by_tag("sublet_pause_tags");
}

/* The memory comes back as it was, and the context lives. */
static void end(const char *what)
{
    unsigned char byte = 0;
    CUresult code = cuCtxSynchronize();
    by_tag("sublet_resume_tags");
    OK(cuMemcpyDtoH(&byte, away, 1));
    printf("%s: context %s, contents %d\n", what, driver_error(code), byte);
}

static CUresult rows(CUdeviceptr to, size_t x, size_t y, size_t width, size_t height)
{
    Copy2d copy = {.from = {.kind = HOST, .host = host, .pitch = ROW},
                   .to = {.x = x, .y = y, .kind = DEVICE, .device = to, .pitch = ROW}, .width = width, .height = height};
    return ((CUresult(*)(const Copy2d *, CUstream))found("cuMemcpy2DAsync_v2"))(&copy, stream);
}

static CUresult box(CUdeviceptr to, size_t z, size_t width, size_t height, size_t depth)
{
    Copy3d copy = {.from = {.kind = HOST, .host = host, .pitch = ROW, .height = 2},
                   .to = {.z = z, .kind = DEVICE, .device = to, .pitch = ROW, .height = 2},
                   .width = width, .height = height, .depth = depth};
    return ((CUresult(*)(const Copy3d *, CUstream))found("cuMemcpy3DAsync_v2"))(&copy, stream);
}

static CUresult boxes(CUdeviceptr to, size_t row, size_t layer, size_t depth, size_t *failed)
{
    BatchCopy copy = {.from = {1, near, 0, 0, {0, 0}}, .to = {1, to, row, layer, {0, 0}}, .extent = {ROW, 2, depth}, .order = 1};
    typedef CUresult (*Batch)(size_t, BatchCopy *, size_t *, uint64_t, CUstream);
    return ((Batch)found("cuMemcpy3DBatchAsync"))(1, &copy, failed, 0, stream);
}

static CUresult batch(CUdeviceptr to, size_t bytes, size_t *failed)
{
    typedef CUresult (*Batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *, size_t, size_t *, CUstream);
    CUdeviceptr all[] = {near + ROW, to}, from[] = {near, near};
    size_t sizes[] = {8, bytes}, first = 0;
    int attributes[8] = {1};
    return ((Batch)found("cuMemcpyBatchAsync"))(all, from, sizes, 2, attributes, &first, 1, failed, stream);
}

static void reach(void)
{
    size_t failed = 0;
    CUdeviceptr before = away - NEAR;
    Reduction reduction = {.kind = 8, .address = away, .value = 1};
    typedef CUresult (*Operations)(CUstream, unsigned, void *, unsigned);
    Operations operations = (Operations)found("cuStreamBatchMemOp_v2");
    printf("before it: line %d, batch %d, rows %d, box %d, boxes %d\n", cuMemcpyHtoDAsync(before, host, NEAR, stream),
           batch(before, NEAR, &failed), rows(before, 0, 0, ROW, 2), box(before, 0, ROW, 2, 1), boxes(before, 0, 0, 1, &failed));
    printf("into it: line %d, batch %d, rows %d, box %d, boxes %d\n", cuMemcpyHtoDAsync(before, host, NEAR + 1, stream),
           batch(before, NEAR + 1, &failed), rows(before, 0, 0, ROW, 3), box(before, 0, ROW, 2, 2), boxes(before, 0, 0, 2, &failed));
    printf("by an offset: rows %d %d, box %d, boxes %d\n", rows(before, 0, 2, ROW, 1), rows(before, NEAR, 0, 1, 1),
           box(before, 1, ROW, 1, 1), boxes(before - NEAR, NEAR, 2, 2, &failed));
    printf("a reduction there: %d\n", operations(stream, 1, &reduction, 0));
}

static void nothing(void)
{
    size_t failed = 0;
    CUdeviceptr inside = away + ROW;
    printf("nothing: copies %d %d %d, fill %d, batch %d, rows %d %d, box %d\n", cuMemcpyHtoDAsync(inside, host, 0, stream),
           cuMemcpyDtoH(host, inside, 0), cuMemcpyDtoDAsync(near, inside, 0, stream), cuMemsetD8(inside, 0, 0),
           batch(inside, 0, &failed), rows(inside, 0, 0, 0, 2), rows(inside, 0, 0, ROW, 0), box(inside, 0, ROW, 2, 0));
    typedef CUresult (*Rows)(CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream);
    Rows fill = (Rows)found("cuMemsetD2D8Async");
    printf("nothing: fills of rows %d %d\n", fill(inside, ROW, 1, 0, 2, stream), fill(inside, ROW, 1, ROW, 0, stream));
}

static void indexes(void)
{
    size_t failed[2] = {7, 7};
    CUresult codes[] = {batch(away, 8, &failed[0]), boxes(away, 0, 0, 1, &failed[1])};
    printf("batches %d %d, of no copy alone %d %d\n", codes[0], codes[1], failed[0] == SIZE_MAX, failed[1] == SIZE_MAX);
    printf("without an index %d %d\n", batch(away, 8, NULL), boxes(away, 0, 0, 1, NULL));
}

static void *capture(void *none)
{
    CUstream own = NULL;
    CUgraph graph = NULL;
    CUresult copied, ended;
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&own, 1));
    OK(cuStreamBeginCapture(own, 0));
    copied = cuMemcpyDtoDAsync(near, away, 8, own);
    atomic_store(&right, 1);
    while (!atomic_load(&is_over))
        usleep(100);
    ended = cuStreamEndCapture(own, &graph);
    printf("captured %d, ended %s\n", copied, driver_error(ended));
    return none;
}

static void captured(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, capture, NULL) != 0)
        exit(1);
    while (!atomic_load(&right))
        usleep(100);
    printf("meanwhile: legacy %d %d, own %d, stream %d, none %d\n", cuMemcpyHtoDAsync(away, host, 8, NULL),
           cuMemcpyHtoDAsync(away, host, 8, (CUstream)1), cuMemcpyHtoDAsync(away, host, 8, (CUstream)2),
           cuMemcpyHtoDAsync(away, host, 8, stream), cuMemcpyHtoD(away, host, 8));
    atomic_store(&is_over, 1);
    pthread_join(thread, NULL);
}

/* A copy between devices that do not reach each other: the driver would let no memory be opened to the other device, and what is
 * away comes back without that. */
static void across(void)
{
    CUcontext other = NULL;
    CUdeviceptr there = 0, block = 0, here = 0;
    CUstream own = NULL;
    CUgraph graph = NULL;
    by_tag("sublet_resume_tags");
    ((int (*)(const char *, int))found("sublet_region_begin"))("weights", SUBLET_CONTENTS_KEEP);
    OK(cuMemAlloc(&block, BYTES));
    ((int (*)(void))found("sublet_region_end"))();
    OK(cuMemAlloc(&here, BYTES));
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxSetCurrent(other));
    OK(cuMemAlloc(&there, BYTES));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&own, 1));
    by_tag("sublet_pause_tags");
    OK(cuStreamBeginCapture(own, 0));
    CUresult code = cuMemcpyDtoDAsync(there, block, 8, own);
    CUresult ended = cuStreamEndCapture(own, &graph);
    printf("across: captured %d, ended %d, by itself %d, of other memory %d\n", code, ended,
           cuMemcpyDtoDAsync(there, block, 8, own), cuMemcpyDtoDAsync(there, here, 8, own));
}

static void *copy_always(void *none)
{
    CUstream own = NULL;
    unsigned char bytes[ROW] = {0};
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&own, 1));
    while (!atomic_load(&is_over)) {
        memset(bytes, 0, sizeof bytes);
        CUresult code = cuMemcpyDtoHAsync(bytes, away + ROW, sizeof bytes, own);
        CUresult waited = cuStreamSynchronize(own);
        int is_right = waited == CU_OK && (code == NOT_PERMITTED ? bytes[7] == 0 : code == CU_OK && bytes[7] == 5);
        atomic_fetch_add(is_right ? &right : &wrong, 1);
    }
    return none;
}

static void always(void)
{
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        if (pthread_create(&threads[i], NULL, copy_always, NULL) != 0)
            exit(1);
    for (int round = 0; round < ROUNDS; round++) {
        by_tag("sublet_resume_tags");
        usleep(1000);
        by_tag("sublet_pause_tags");
        usleep(1000);
    }
    atomic_store(&is_over, 1);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    printf("always: %d wrong, some %d\n", atomic_load(&wrong), atomic_load(&right) > 0);
}

int main(int count, char **words)
{
    static const struct {
        const char *word;
        void (*act)(void);
    } acts[] = {{"reach", reach}, {"nothing", nothing}, {"index", indexes}, {"captured", captured}, {"across", across}, {"always", always}};
    inside_deadline(300);
    begin();
    for (size_t i = 0; count > 1 && i < sizeof acts / sizeof *acts; i++)
        if (strcmp(words[1], acts[i].word) == 0)
            acts[i].act();
    end(words[1]);
    return 0;
}
