/* A process whose memory all stays with the driver, one word an argument: async, pool, managed, pitched, array.
 *
 * `wide` asks for rows of all addresses there are, and `rights` gives rights to as many places; both end there. Otherwise:
 * It pauses itself, prints what it is told of itself as JSON, uses the memory after the resume, and frees it; `prefetch` also
 * asks for managed memory to be moved, which waits for the resume. */
#include "driver.h"
#include "attach.h"
#include "inside.h"

#include <pthread.h>
#include <stdbool.h>

enum { BYTES = 8 << 20 };

#define STAYING_FUNCTIONS(X) \
    X(allocate_managed, cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned)) \
    X(allocate_pitched, cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned)) \
    X(allocate_from_pool, cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUpool, CUstream)) \
    X(prefetch, cuMemPrefetchAsync, (CUdeviceptr, size_t, CUdevice, CUstream)) \
    X(create_array, cuArray3DCreate_v2, (CUhandle *, const void *)) \
    X(destroy_array, cuArrayDestroy, (CUhandle))

#define DECLARE_STAYING(name, symbol, arguments) static CUresult(*name) arguments;
STAYING_FUNCTIONS(DECLARE_STAYING)

static CUdeviceptr managed;
static CUcontext context;
static volatile bool is_resumed, was_resumed;

static void look_up(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
#define LOOK_UP(name, symbol, arguments) \
    if ((*(void **)&name = dlsym(library, #symbol)) == NULL) \
        driver_missing(#symbol);
    STAYING_FUNCTIONS(LOOK_UP)
}

static void *move(void *unused)
{
    OK(cuCtxSetCurrent(context));
    OK(prefetch(managed, BYTES, -1, NULL));
    OK(prefetch(managed, BYTES, 0, NULL));
    was_resumed = is_resumed;
    return unused;
}

int main(int count, char **words)
{
    struct {
        size_t sides[3];
        int format;
        unsigned channels, flags;
    } wanted = {{1024, 1024, 2}, 0x20, 1, 0};
    const char *word = count == 2 ? words[1] : "";
    CUdeviceptr data = 0;
    CUhandle array = 0;
    size_t pitch = 0;
    CUpool pool = NULL;
    CUstream stream = NULL;
    pthread_t thread;
    inside_deadline(20);
    driver_start();
    look_up();
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuStreamCreate(&stream, 1));
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    if (strcmp(word, "wide") == 0) {
        printf("pitched %d\n", allocate_pitched(&data, &pitch, (size_t)-1, 1, 4));
        return 0;
    }
    if (strcmp(word, "rights") == 0) {
        CUaccess access = {{1, 0}, 3};
        OK(cuMemAlloc(&data, BYTES));
        printf("rights %d\n", cuMemSetAccess(data, BYTES, &access, (size_t)-1));
        return 0;
    }
    if (strcmp(word, "async") == 0)
        OK(cuMemAllocAsync(&data, BYTES, stream));
    else if (strcmp(word, "pool") == 0)
        OK(allocate_from_pool(&data, BYTES, pool, stream));
    else if (strcmp(word, "managed") == 0 || strcmp(word, "prefetch") == 0)
        OK(allocate_managed(&data, BYTES, 1));
    else if (strcmp(word, "pitched") == 0)
        OK(allocate_pitched(&data, &pitch, 4095, BYTES / 4096, 4));
    else if (strcmp(word, "array") == 0)
        OK(create_array(&array, &wanted));
    OK(cuStreamSynchronize(stream));
    managed = data;
    inside_pause();
    attach_print_json("sublet_stats_json");
    if (strcmp(word, "prefetch") == 0 && pthread_create(&thread, NULL, move, NULL) == 0) {
        usleep(50000);
        is_resumed = true;
        inside_resume();
        pthread_join(thread, NULL);
        printf("moved %s\n", was_resumed ? "after the resume" : "too early");
    } else {
        inside_resume();
    }
    if (array != 0)
        OK(destroy_array(array));
    else {
        OK(cuMemsetD8(data, 5, BYTES));
        OK(cuCtxSynchronize());
        OK(strcmp(word, "async") == 0 ? cuMemFreeAsync(data, stream) : cuMemFree(data));
    }
    OK(cuStreamSynchronize(stream));
    attach_print_json("sublet_stats_json");
    return 0;
}
