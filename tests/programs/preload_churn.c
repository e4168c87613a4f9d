/* Threads that make, fill, look at and end all kinds of memory, streams, graphs and contexts, while the process is paused and resumed:
 *
 *   preload_churn SEED THREADS PAUSES
 *
 * Each thread knows what every byte of its own memory must be. Values and addresses that the driver gives out again are
 * soon those of another thread. It prints the same with and without Sublet. */
#include "at_random.h"
#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define MORE_FUNCTIONS(X) \
    X(context_create, cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) \
    X(context_destroy, cuCtxDestroy_v2, (CUcontext))

#define DECLARE_MORE(name, symbol, arguments) static CUresult(*name) arguments;
MORE_FUNCTIONS(DECLARE_MORE)

enum { PAGE = 2 << 20, OBJECTS = 5, PAGES_MAX = 3, THREADS_MAX = 16, DEVICES = 2, RELAXED = 2 };

typedef enum { NOTHING, PLAIN, SMALL, MAPPED, OF_STREAM, OF_CONTEXT, KINDS } Kind;

typedef struct {
    Kind kind;
    CUdeviceptr address;
    size_t bytes;
    unsigned word;
    /* Of mapped memory: a second mapping of its first page, by another handle of it or the same, or none. */
    CUdeviceptr also;
    CUcontext context;
} Object;

typedef struct {
    uint64_t random;
    int device;
    CUstream stream;
    CUgraphExec graph;
    /* What the graph fills, and with what. */
    Object *filled;
    unsigned filled_word;
    Object objects[OBJECTS];
} Worker;

static CUcontext primary[DEVICES];
static atomic_bool is_over;
static atomic_uint begun;

static unsigned draw(Worker *worker, unsigned below)
{
    return random_below(&worker->random, below);
}

/* A module is of one context. */
static CUfunction kernels[DEVICES];

static void launch_fill(const Worker *worker, const Object *object, unsigned word)
{
    CUdeviceptr target = object->address;
    uint64_t count = object->bytes / 4;
    void *params[] = {&target, &word, &count};
    OK(cuLaunchKernel(kernels[worker->device], 1, 1, 1, 32, 1, 1, 0, worker->stream, params, NULL));
}

static void wrong(const Object *object, size_t at, unsigned found)
{
    printf("kind %d at %llx: word %zu is %u and not %u\n", object->kind, (unsigned long long)object->address, at, found,
           object->word);
    exit(1);
}

static void look_at(Worker *worker, const Object *object)
{
    size_t words = object->bytes / 4;
    size_t places[3] = {0, words - 1, draw(worker, (unsigned)words)};
    for (int i = 0; i < 3; i++) {
        unsigned found = 0;
        OK(cuMemcpyDtoHAsync(&found, object->address + 4 * places[i], 4, worker->stream));
        OK(cuStreamSynchronize(worker->stream));
        if (found != object->word)
            wrong(object, places[i], found);
    }
    if (object->also != 0) {
        unsigned found = 0;
        OK(cuMemcpyDtoH(&found, object->also + PAGE - 4, 4));
        if (found != object->word)
            wrong(object, 0, found);
    }
}

static void fill_from_host(Worker *worker, Object *object)
{
    unsigned *words = malloc(object->bytes);
    if (words == NULL)
        exit(1);
    for (size_t i = 0; i < object->bytes / 4; i++)
        words[i] = object->word;
    bool is_registered = draw(worker, 2) == 0;
    if (is_registered)
        OK(cuMemHostRegister(words, object->bytes, 0));
    OK(cuMemcpyHtoDAsync(object->address, words, object->bytes, worker->stream));
    OK(cuStreamSynchronize(worker->stream));
    if (is_registered)
        OK(cuMemHostUnregister(words));
    free(words);
}

static void fill(Worker *worker, Object *object)
{
    object->word = draw(worker, 1u << 30);
    switch (draw(worker, 4)) {
    case 0:
        launch_fill(worker, object, object->word);
        break;
    case 1:
        fill_from_host(worker, object);
        break;
    default:
        OK(cuMemsetD32Async(object->address, object->word, object->bytes / 4, worker->stream));
    }
    OK(cuStreamSynchronize(worker->stream));
}

static void copy(Worker *worker, Object *to, const Object *from)
{
    if (from->kind == NOTHING || from->bytes < to->bytes || to == from)
        return;
    OK(cuMemcpyDtoDAsync(to->address, from->address, to->bytes, worker->stream));
    OK(cuStreamSynchronize(worker->stream));
    to->word = from->word;
}

static CUprop prop_of(const Worker *worker)
{
    CUprop prop = driver_prop();
    prop.location.id = worker->device;
    return prop;
}

/* Another reference to what `handle` is of, by a file or by an address that it is mapped at, which may have the same value; or none. */
static CUhandle another(Worker *worker, CUhandle handle, CUdeviceptr mapped)
{
    CUhandle other = 0;
    int file = -1;
    switch (draw(worker, 3)) {
    case 0:
        OK(cuMemExportToShareableHandle(&file, handle, CU_FD, 0));
        OK(cuMemImportFromShareableHandle(&other, (void *)(uintptr_t)file, CU_FD));
        close(file);
        break;
    case 1:
        OK(cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)mapped));
        break;
    default:
        break;
    }
    return other;
}

static void map(Worker *worker, Object *object)
{
    CUaccess access = {{1, worker->device}, 3};
    CUprop prop = prop_of(worker);
    size_t pages = object->bytes / PAGE;
    OK(cuMemAddressReserve(&object->address, object->bytes, 0, 0, 0));
    for (size_t i = 0; i < pages; i++) {
        CUhandle handle = 0;
        OK(cuMemCreate(&handle, PAGE, &prop, 0));
        OK(cuMemMap(object->address + i * PAGE, PAGE, 0, handle, 0));
        if (i == 0 && draw(worker, 2) == 0) {
            OK(cuMemAddressReserve(&object->also, PAGE, 0, 0, 0));
            CUhandle other = another(worker, handle, object->address);
            OK(cuMemMap(object->also, PAGE, 0, other != 0 ? other : handle, 0));
            OK(cuMemSetAccess(object->also, PAGE, &access, 1));
            if (other != 0)
                OK(cuMemRelease(other));
        }
        OK(cuMemRelease(handle));
    }
    OK(cuMemSetAccess(object->address, object->bytes, &access, 1));
}

static void make(Worker *worker, Object *object)
{
    *object = (Object){.kind = (Kind)(1 + draw(worker, KINDS - 1)), .bytes = PAGE * (1 + draw(worker, PAGES_MAX))};
    switch (object->kind) {
    case SMALL:
        object->bytes = 512;
        OK(cuMemAlloc(&object->address, object->bytes));
        break;
    case MAPPED:
        map(worker, object);
        break;
    case OF_STREAM:
        OK(cuMemAllocAsync(&object->address, object->bytes, worker->stream));
        break;
    case OF_CONTEXT:
        OK(context_create(&object->context, 0, worker->device));
        OK(cuMemAlloc(&object->address, object->bytes));
        OK(cuCtxSetCurrent(primary[worker->device]));
        break;
    default:
        OK(cuMemAlloc(&object->address, object->bytes));
    }
    fill(worker, object);
}

static void end_graph(Worker *worker)
{
    if (worker->graph != NULL)
        OK(cuGraphExecDestroy(worker->graph));
    worker->graph = NULL;
    worker->filled = NULL;
}

static void end(Worker *worker, Object *object)
{
    look_at(worker, object);
    if (worker->filled == object)
        end_graph(worker);
    switch (object->kind) {
    case MAPPED:
        if (object->also != 0)
            driver_unmap(object->also, PAGE);
        driver_unmap(object->address, object->bytes);
        break;
    case OF_STREAM:
        OK(cuMemFreeAsync(object->address, worker->stream));
        OK(cuStreamSynchronize(worker->stream));
        break;
    case OF_CONTEXT:
        /* Its memory goes with it. */
        OK(context_destroy(object->context));
        OK(cuCtxSetCurrent(primary[worker->device]));
        break;
    default:
        OK(cuMemFree(object->address));
    }
    object->kind = NOTHING;
}

static void capture(Worker *worker, Object *object)
{
    CUgraph graph = NULL;
    end_graph(worker);
    worker->filled_word = draw(worker, 1u << 30);
    OK(cuStreamBeginCapture(worker->stream, RELAXED));
    launch_fill(worker, object, worker->filled_word);
    OK(cuStreamEndCapture(worker->stream, &graph));
    OK(cuGraphInstantiate(&worker->graph, graph, 0));
    OK(cuGraphDestroy(graph));
    worker->filled = object;
}

static void replay(Worker *worker)
{
    OK(cuGraphLaunch(worker->graph, worker->stream));
    OK(cuStreamSynchronize(worker->stream));
    worker->filled->word = worker->filled_word;
}

static void renew_stream(Worker *worker)
{
    OK(cuStreamDestroy(worker->stream));
    OK(cuStreamCreate(&worker->stream, 1));
}

static void act(Worker *worker)
{
    Object *object = &worker->objects[draw(worker, OBJECTS)];
    if (object->kind == NOTHING) {
        make(worker, object);
        return;
    }
    switch (draw(worker, 9)) {
    case 0:
    case 1:
        end(worker, object);
        break;
    case 2:
        fill(worker, object);
        break;
    case 3:
        if (object->kind != OF_CONTEXT)
            capture(worker, object);
        break;
    case 4:
        if (worker->graph != NULL)
            replay(worker);
        break;
    case 5:
        renew_stream(worker);
        break;
    case 6:
        copy(worker, object, &worker->objects[draw(worker, OBJECTS)]);
        break;
    default:
        look_at(worker, object);
    }
}

static void *work(void *argument)
{
    Worker *worker = argument;
    OK(cuCtxSetCurrent(primary[worker->device]));
    OK(cuStreamCreate(&worker->stream, 1));
    while (!is_over) {
        act(worker);
        begun++;
    }
    for (int i = 0; i < OBJECTS; i++)
        if (worker->objects[i].kind != NOTHING)
            end(worker, &worker->objects[i]);
    end_graph(worker);
    OK(cuStreamDestroy(worker->stream));
    return NULL;
}

/* Of all devices, without what their pools keep. */
static size_t free_bytes(void)
{
    size_t all = 0;
    for (int i = 0; i < DEVICES; i++) {
        CUpool pool = NULL;
        OK(cuCtxSetCurrent(primary[i]));
        OK(cuDeviceGetDefaultMemPool(&pool, i));
        OK(cuMemPoolTrimTo(pool, 0));
        all += driver_free_bytes();
    }
    return all;
}

static void look_up(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
#define LOOK_UP(name, symbol, arguments) \
    if ((*(void **)&name = dlsym(library, #symbol)) == NULL) \
        driver_missing(#symbol);
    MORE_FUNCTIONS(LOOK_UP)
}

int main(int count, char **words)
{
    static Worker workers[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    inside_deadline(240);
    uint64_t seed = count > 1 ? strtoull(words[1], NULL, 10) : 1;
    int many = count > 2 ? atoi(words[2]) : 4, pauses = count > 3 ? atoi(words[3]) : 20;
    driver_start();
    look_up();
    for (int i = 0; i < DEVICES; i++) {
        CUmodule module = NULL;
        OK(cuDevicePrimaryCtxRetain(&primary[i], i));
        OK(cuCtxSetCurrent(primary[i]));
        OK(cuModuleLoadData(&module, "image"));
        OK(cuModuleGetFunction(&kernels[i], module, "fill_u32"));
    }
    size_t before = free_bytes();
    for (int i = 0; i < many && i < THREADS_MAX; i++) {
        workers[i].random = seed * 1000 + (unsigned)i;
        workers[i].device = i % DEVICES;
        if (pthread_create(&threads[i], NULL, work, &workers[i]) != 0)
            return 1;
    }
    /* The process joins its tenant with its first memory. */
    while (begun < 20)
        usleep(1000);
    pause_at_random(seed, pauses);
    is_over = true;
    for (int i = 0; i < many && i < THREADS_MAX; i++)
        pthread_join(threads[i], NULL);
    printf("churn: %lld bytes less are free\n", (long long)before - (long long)free_bytes());
    return 0;
}
