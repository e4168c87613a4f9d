/* Calls that few libraries make, each once before a pause and once during it: copies of rows, boxes and batches, fills of
 * rows, waits for values and writes of them, cooperative launches.
 *
 * Each writes a value of its own where it alone writes. The process pauses itself, a thread a call then makes all of them, and
 * none is done before the resume. It prints the same with and without Sublet.
 *
 * With the word `asleep` the process runs on without that memory: each call is refused, and the context lives. */
#include "copies.h"
#include "driver.h"
#include "inside.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sublet.h>

enum { ROW = 64, PITCH = 256, ROWS = 4, PLACE = PITCH * ROWS, BYTES = 8 << 20, HOST = 1, DEVICE = 2, NOT_PERMITTED = 800 };

typedef struct {
    unsigned kind;
    CUdeviceptr address;
    uint64_t value;
    unsigned flags;
    CUdeviceptr alias;
    uint64_t rest;
} Operation;

static CUcontext context;
static CUstream stream;
static CUfunction store;
static CUdeviceptr memory, pattern;
static CUhandle array;
static unsigned char host[PLACE];
static CUdeviceptr managed;
static atomic_int done;
static atomic_int is_resumed;
static int is_asleep;

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

/* Each call has a place of its own, with rows at a pitch. */
typedef CUresult (*Act)(void *function, CUdeviceptr place);
typedef CUresult (*OfPointer)(const void *);
typedef CUresult (*OfPointerAndStream)(const void *, CUstream);

static Copy2d rows_to(CUdeviceptr place)
{
    return (Copy2d){.from = {.kind = HOST, .host = host, .pitch = ROW},
                    .to = {.kind = DEVICE, .device = place, .pitch = PITCH}, .width = ROW, .height = ROWS};
}

static Copy3d box_to(CUdeviceptr place)
{
    return (Copy3d){.from = {.kind = DEVICE, .device = pattern, .context = context, .pitch = ROW, .height = 2},
                    .to = {.kind = DEVICE, .device = place, .context = context, .pitch = PITCH, .height = 2},
                    .width = ROW, .height = 2, .depth = 2};
}

static CUresult copy_rows(void *function, CUdeviceptr place)
{
    Copy2d copy = rows_to(place);
    return ((OfPointer)function)(&copy);
}

static CUresult copy_rows_later(void *function, CUdeviceptr place)
{
    Copy2d copy = rows_to(place);
    return ((OfPointerAndStream)function)(&copy, stream);
}

static CUresult copy_box(void *function, CUdeviceptr place)
{
    Copy3d copy = box_to(place);
    return ((OfPointer)function)(&copy);
}

static CUresult copy_box_later(void *function, CUdeviceptr place)
{
    Copy3d copy = box_to(place);
    return ((OfPointerAndStream)function)(&copy, stream);
}

static CUresult to_array(void *function, CUdeviceptr place)
{
    (void)place;
    return ((CUresult(*)(CUhandle, size_t, CUdeviceptr, size_t))function)(array, 0, pattern, ROW * ROWS);
}

static CUresult from_array(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUdeviceptr, CUhandle, size_t, size_t))function)(place, array, 0, ROW * ROWS);
}

static CUresult fill_rows_8(void *function, CUdeviceptr place)
{
    typedef CUresult (*Fill)(CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream);
    return ((Fill)function)(place, PITCH, 7, ROW, ROWS, stream);
}

static CUresult fill_rows_16(void *function, CUdeviceptr place)
{
    typedef CUresult (*Fill)(CUdeviceptr, size_t, unsigned short, size_t, size_t, CUstream);
    return ((Fill)function)(place, PITCH, 0x0707, ROW / 2, ROWS, stream);
}

static CUresult fill_rows_32(void *function, CUdeviceptr place)
{
    typedef CUresult (*Fill)(CUdeviceptr, size_t, unsigned, size_t, size_t, CUstream);
    return ((Fill)function)(place, PITCH, 0x07070707, ROW / 4, ROWS, stream);
}

static CUresult fill_16(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUdeviceptr, unsigned short, size_t, CUstream))function)(place, 0x0707, ROW / 2, stream);
}

static CUresult fill_8(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUdeviceptr, unsigned char, size_t, CUstream))function)(place, 7, ROW, stream);
}

static CUresult fill_32(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUdeviceptr, unsigned, size_t, CUstream))function)(place, 0x07070707, ROW / 4, stream);
}

static CUresult copy_line(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUdeviceptr, CUdeviceptr, size_t, CUstream))function)(place, pattern, ROW, stream);
}

static CUresult copy_line_in(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUdeviceptr, const void *, size_t, CUstream))function)(place, host, ROW, stream);
}

static CUresult copy_line_across(void *function, CUdeviceptr place)
{
    typedef CUresult (*Across)(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream);
    return ((Across)function)(place, context, pattern, context, ROW, stream);
}

static CUresult copy_batch(void *function, CUdeviceptr place)
{
    typedef CUresult (*Batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *, size_t, size_t *, CUstream);
    CUdeviceptr to[] = {place, place + PITCH}, from[] = {pattern, pattern + ROW};
    size_t sizes[] = {ROW, ROW}, first = 0, failed = 0;
    int attributes[8] = {1};
    return ((Batch)function)(to, from, sizes, 2, attributes, &first, 1, &failed, stream);
}

static CUresult copy_batch_v2(void *function, CUdeviceptr place)
{
    typedef CUresult (*Batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *, size_t, CUstream);
    CUdeviceptr to[] = {place, place + PITCH}, from[] = {pattern, pattern + ROW};
    size_t sizes[] = {ROW, ROW}, first = 0;
    int attributes[8] = {1};
    return ((Batch)function)(to, from, sizes, 2, attributes, &first, 1, stream);
}

static BatchCopy boxes_to(CUdeviceptr place)
{
    return (BatchCopy){.from = {1, pattern, ROW, ROWS, {0, 0}}, .to = {1, place, PITCH, ROWS, {0, 0}},
                       .extent = {ROW, ROWS, 1}, .order = 1};
}

static CUresult copy_boxes(void *function, CUdeviceptr place)
{
    BatchCopy copy = boxes_to(place);
    size_t failed = 0;
    return ((CUresult(*)(size_t, BatchCopy *, size_t *, uint64_t, CUstream))function)(1, &copy, &failed, 0, stream);
}

static CUresult copy_boxes_v2(void *function, CUdeviceptr place)
{
    BatchCopy copy = boxes_to(place);
    return ((CUresult(*)(size_t, BatchCopy *, uint64_t, CUstream))function)(1, &copy, 0, stream);
}

/* What is waited for has been written on the same stream before. */
static CUresult value_32(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUstream, CUdeviceptr, unsigned, unsigned))function)(stream, place, 0x07070707, 0);
}

static CUresult value_64(void *function, CUdeviceptr place)
{
    return ((CUresult(*)(CUstream, CUdeviceptr, uint64_t, unsigned))function)(stream, place, 0x0707070707070707, 0);
}

static CUresult waited_32(void *function, CUdeviceptr place)
{
    if (!is_asleep)
        OK(cuMemsetD32Async(place, 0x07070707, 1, stream));
    return value_32(function, place);
}

static CUresult waited_64(void *function, CUdeviceptr place)
{
    if (!is_asleep)
        OK(cuMemsetD32Async(place, 0x07070707, 2, stream));
    return value_64(function, place);
}

static CUresult operations(void *function, CUdeviceptr place)
{
    Operation all[] = {{.kind = 2, .address = place, .value = 0x07070707},
                       {.kind = 1, .address = place, .value = 0x07070707, .flags = 1},
                       {.kind = 5, .address = place + 8, .value = 0x0707070707070707},
                       {.kind = 4, .address = place + 8, .value = 7, .flags = 2}};
    return ((CUresult(*)(CUstream, unsigned, Operation *, unsigned))function)(stream, 4, all, 0);
}

static CUresult launch(void *function, CUdeviceptr place)
{
    typedef CUresult (*Launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                               void **);
    unsigned value = 0x07070707;
    void *params[] = {&place, &value};
    return ((Launch)function)(store, 1, 1, 1, 1, 1, 1, 0, stream, params);
}

static CUresult prefetch_v2(void *function, CUdeviceptr place)
{
    CUlocation where = {1, 0};
    OK(cuMemsetD32Async(place, 0x07070707, 1, stream));
    return ((CUresult(*)(CUdeviceptr, size_t, CUlocation, unsigned, CUstream))function)(managed, ROW, where, 0, stream);
}

static CUresult prefetch_batch(void *function, CUdeviceptr place)
{
    typedef CUresult (*Batch)(CUdeviceptr *, size_t *, size_t, CUlocation *, size_t *, size_t, uint64_t, CUstream);
    CUlocation where = {1, 0};
    size_t size = ROW, first = 0;
    OK(cuMemsetD32Async(place, 0x07070707, 1, stream));
    return ((Batch)function)(&managed, &size, 1, &where, &first, 1, 0, stream);
}

static const struct {
    const char *name;
    Act act;
} calls[] = {
    {"cuMemcpy", copy_line},
    {"cuMemcpy_ptds", copy_line},
    {"cuMemcpyDtoD_v2", copy_line},
    {"cuMemcpyDtoD_v2_ptds", copy_line},
    {"cuMemcpyHtoD_v2", copy_line_in},
    {"cuMemcpyHtoD_v2_ptds", copy_line_in},
    {"cuMemcpyPeer", copy_line_across},
    {"cuMemcpyPeer_ptds", copy_line_across},
    {"cuMemsetD8_v2", fill_8},
    {"cuMemsetD8_v2_ptds", fill_8},
    {"cuMemsetD32_v2", fill_32},
    {"cuMemsetD32_v2_ptds", fill_32},
    {"cuMemcpyAsync", copy_line},
    {"cuMemcpyAsync_ptsz", copy_line},
    {"cuMemcpyDtoDAsync_v2", copy_line},
    {"cuMemcpyDtoDAsync_v2_ptsz", copy_line},
    {"cuMemcpyHtoDAsync_v2", copy_line_in},
    {"cuMemcpyHtoDAsync_v2_ptsz", copy_line_in},
    {"cuMemcpyPeerAsync", copy_line_across},
    {"cuMemcpyPeerAsync_ptsz", copy_line_across},
    {"cuMemsetD8Async", fill_8},
    {"cuMemsetD8Async_ptsz", fill_8},
    {"cuMemsetD32Async", fill_32},
    {"cuMemsetD32Async_ptsz", fill_32},
    {"cuMemcpy2D_v2", copy_rows},
    {"cuMemcpy2D_v2_ptds", copy_rows},
    {"cuMemcpy2DUnaligned_v2", copy_rows},
    {"cuMemcpy2DUnaligned_v2_ptds", copy_rows},
    {"cuMemcpy2DAsync_v2", copy_rows_later},
    {"cuMemcpy2DAsync_v2_ptsz", copy_rows_later},
    {"cuMemcpy3D_v2", copy_box},
    {"cuMemcpy3D_v2_ptds", copy_box},
    {"cuMemcpy3DPeer", copy_box},
    {"cuMemcpy3DPeer_ptds", copy_box},
    {"cuMemcpy3DAsync_v2", copy_box_later},
    {"cuMemcpy3DAsync_v2_ptsz", copy_box_later},
    {"cuMemcpy3DPeerAsync", copy_box_later},
    {"cuMemcpy3DPeerAsync_ptsz", copy_box_later},
    {"cuMemcpyAtoD_v2", from_array},
    {"cuMemcpyAtoD_v2_ptds", from_array},
    {"cuMemsetD2D8_v2", fill_rows_8},
    {"cuMemsetD2D8_v2_ptds", fill_rows_8},
    {"cuMemsetD2D8Async", fill_rows_8},
    {"cuMemsetD2D8Async_ptsz", fill_rows_8},
    {"cuMemsetD2D16_v2", fill_rows_16},
    {"cuMemsetD2D16_v2_ptds", fill_rows_16},
    {"cuMemsetD2D16Async", fill_rows_16},
    {"cuMemsetD2D16Async_ptsz", fill_rows_16},
    {"cuMemsetD2D32_v2", fill_rows_32},
    {"cuMemsetD2D32_v2_ptds", fill_rows_32},
    {"cuMemsetD2D32Async", fill_rows_32},
    {"cuMemsetD2D32Async_ptsz", fill_rows_32},
    {"cuMemsetD16_v2", fill_16},
    {"cuMemsetD16_v2_ptds", fill_16},
    {"cuMemsetD16Async", fill_16},
    {"cuMemsetD16Async_ptsz", fill_16},
    {"cuMemcpyBatchAsync", copy_batch},
    {"cuMemcpyBatchAsync_ptsz", copy_batch},
    {"cuMemcpyBatchAsync_v2", copy_batch_v2},
    {"cuMemcpyBatchAsync_v2_ptsz", copy_batch_v2},
    {"cuMemcpy3DBatchAsync", copy_boxes},
    {"cuMemcpy3DBatchAsync_ptsz", copy_boxes},
    {"cuMemcpy3DBatchAsync_v2", copy_boxes_v2},
    {"cuMemcpy3DBatchAsync_v2_ptsz", copy_boxes_v2},
    {"cuStreamWriteValue32", value_32},
    {"cuStreamWriteValue32_ptsz", value_32},
    {"cuStreamWriteValue32_v2", value_32},
    {"cuStreamWriteValue32_v2_ptsz", value_32},
    {"cuStreamWriteValue64", value_64},
    {"cuStreamWriteValue64_ptsz", value_64},
    {"cuStreamWriteValue64_v2", value_64},
    {"cuStreamWriteValue64_v2_ptsz", value_64},
    {"cuStreamWaitValue32", waited_32},
    {"cuStreamWaitValue32_ptsz", waited_32},
    {"cuStreamWaitValue32_v2", waited_32},
    {"cuStreamWaitValue32_v2_ptsz", waited_32},
    {"cuStreamWaitValue64", waited_64},
    {"cuStreamWaitValue64_ptsz", waited_64},
    {"cuStreamWaitValue64_v2", waited_64},
    {"cuStreamWaitValue64_v2_ptsz", waited_64},
    {"cuStreamBatchMemOp", operations},
    {"cuStreamBatchMemOp_ptsz", operations},
    {"cuStreamBatchMemOp_v2", operations},
    {"cuStreamBatchMemOp_v2_ptsz", operations},
    {"cuLaunchCooperativeKernel", launch},
    {"cuLaunchCooperativeKernel_ptsz", launch},
    {"cuMemPrefetchAsync_v2", prefetch_v2},
    {"cuMemPrefetchAsync_v2_ptsz", prefetch_v2},
    {"cuMemPrefetchBatchAsync", prefetch_batch},
    {"cuMemPrefetchBatchAsync_ptsz", prefetch_batch},
    {"cuMemDiscardAndPrefetchBatchAsync", prefetch_batch},
    {"cuMemDiscardAndPrefetchBatchAsync_ptsz", prefetch_batch},
    {"cuMemcpyDtoA_v2", to_array},
    {"cuMemcpyDtoA_v2_ptds", to_array},
};
enum { CALLS = sizeof calls / sizeof *calls };
_Static_assert(CALLS * PLACE <= BYTES, "a place for each call");

static CUdeviceptr place_of(size_t call)
{
    return memory + call * PLACE;
}

static void *make_call(void *index)
{
    size_t call = (size_t)index;
    OK(cuCtxSetCurrent(context));
    CUresult code = calls[call].act(found(calls[call].name), place_of(call));
    if (code != CU_OK)
        printf("%s: %s\n", calls[call].name, driver_error(code));
    if (!atomic_load(&is_resumed))
        printf("%s: was not held\n", calls[call].name);
    atomic_fetch_add(&done, 1);
    return NULL;
}

/* Every call has written sevens at the beginning of its place. */
static void check(const char *when)
{
    int wrong = 0;
    OK(cuCtxSynchronize());
    for (size_t call = 0; call < CALLS; call++) {
        unsigned word = 0;
        OK(cuMemcpyDtoH(&word, place_of(call), sizeof word));
        if (word != 0x07070707 && calls[call].act != to_array) {
            printf("%s: %s wrote %x\n", when, calls[call].name, word);
            wrong++;
        }
    }
    printf("%s: %d of %d are wrong\n", when, wrong, CALLS);
    OK(cuMemsetD8(memory, 0, (size_t)CALLS * PLACE));
    OK(cuCtxSynchronize());
}

/* Kernels are not looked at, prefetches are of other memory, and so is what goes into the array. */
static int is_looked_at(Act act)
{
    return act != launch && act != prefetch_v2 && act != prefetch_batch && act != to_array;
}

static CUresult copy_out_later(void)
{
    return cuMemcpyDtoHAsync(host, memory, ROW, stream);
}

/* Without the memory of a tag, the process goes on. */
static int sleep_and_wake(void)
{
    typedef int (*ByTag)(const char *, const char *const *, size_t, int, uint32_t);
    ByTag pause = (ByTag)found("sublet_pause_tags"), resume = (ByTag)found("sublet_resume_tags");
    const char *tags[] = {"weights"};
    int refused = 0, looked_at = 0;
    is_asleep = 1;
    printf("asleep %d\n", pause(NULL, tags, 1, SUBLET_WHOSE_PROCESS, 0));
    for (size_t call = 0; call < CALLS; call++) {
        if (!is_looked_at(calls[call].act))
            continue;
        CUresult code = calls[call].act(found(calls[call].name), place_of(call));
        looked_at++;
        refused += code == NOT_PERMITTED;
        if (code != NOT_PERMITTED)
            printf("%s: %s\n", calls[call].name, driver_error(code));
    }
    printf("refused: all %d\n", looked_at > 60 && refused == looked_at);
    printf("copied out: %d %d\n", cuMemcpyDtoH(host, memory, ROW), copy_out_later());
    /* A value that is left over in a structure is no address of this copy's. */
    Copy2d rows = {.from = {.kind = HOST, .host = host, .device = memory, .pitch = ROW},
                   .to = {.kind = DEVICE, .host = (void *)memory, .device = pattern, .pitch = PITCH}, .width = ROW, .height = ROWS};
    Operation flush = {.kind = 3, .address = memory};
    Operation pointer = {.kind = 5, .address = pattern + PLACE, .value = memory};
    OK(((OfPointerAndStream)found("cuMemcpy2DAsync_v2"))(&rows, stream));
    typedef CUresult (*Operations)(CUstream, unsigned, Operation *, unsigned);
    CUresult flushed = ((Operations)found("cuStreamBatchMemOp_v2"))(stream, 1, &flush, 0);
    printf("other memory: flush %d, its address written %d\n", flushed == NOT_PERMITTED,
           ((Operations)found("cuStreamBatchMemOp_v2"))(stream, 1, &pointer, 0));
    printf("the context lives: %d\n", launch(found("cuLaunchCooperativeKernel"), pattern));
    OK(cuCtxSynchronize());
    printf("awake %d\n", resume(NULL, tags, 1, SUBLET_WHOSE_PROCESS, 0));
    unsigned char byte = 0;
    OK(cuMemcpyDtoH(&byte, memory, 1));
    printf("contents %d\n", byte);
    return 0;
}

int main(int count, char **words)
{
    pthread_t threads[CALLS];
    CUmodule module = NULL;
    struct {
        size_t sides[3];
        int format;
        unsigned channels, flags;
    } shape = {{ROW, ROWS, 0}, 1, 1, 0};
    inside_deadline(300);
    driver_start();
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuStreamCreate(&stream, 1));
    OK(cuModuleLoadData(&module, "image"));
    OK(cuModuleGetFunction(&store, module, "store_u32"));
    /* Large enough to leave with a pause: calls about what stays are not held. */
    int sleeps = count > 1 && strcmp(words[1], "asleep") == 0;
    if (sleeps)
        ((int (*)(const char *, int))found("sublet_region_begin"))("weights", SUBLET_CONTENTS_KEEP);
    OK(cuMemAlloc(&memory, BYTES));
    if (sleeps)
        ((int (*)(void))found("sublet_region_end"))();
    OK(cuMemsetD8(memory, 0, (size_t)CALLS * PLACE));
    OK(cuMemAlloc(&pattern, BYTES));
    OK(cuMemsetD8(pattern, 7, PLACE));
    OK(((CUresult(*)(CUdeviceptr *, size_t, unsigned))found("cuMemAllocManaged"))(&managed, PLACE, 1));
    OK(((CUresult(*)(CUhandle *, const void *))found("cuArray3DCreate_v2"))(&array, &shape));
    OK(to_array(found("cuMemcpyDtoA_v2"), 0));
    memset(host, 7, sizeof host);
    OK(cuCtxSynchronize());
    if (sleeps) {
        OK(cuMemsetD8(memory, 9, 1));
        return sleep_and_wake();
    }
    atomic_store(&is_resumed, 1);
    for (size_t call = 0; call < CALLS; call++)
        make_call((void *)call);
    check("before");

    inside_pause();
    atomic_store(&is_resumed, dlsym(RTLD_DEFAULT, "sublet_pause_tenant") == NULL);
    atomic_store(&done, 0);
    for (size_t call = 0; call < CALLS; call++)
        if (pthread_create(&threads[call], NULL, make_call, (void *)call) != 0)
            return 1;
    /* A call that is not held is done by then, on a machine that is not busy; a late one waits behind it. */
    usleep(300000);
    atomic_store(&is_resumed, 1);
    inside_resume();
    for (size_t call = 0; call < CALLS; call++)
        pthread_join(threads[call], NULL);
    check("during a pause");
    return 0;
}
