/* One process that uses all devices of the machine from one thread, as a model split over GPUs does. It obeys
 * lines on standard input and answers each with one line: `ok`, or `fail` (and ends).
 *
 *   run      works until the next line comes
 *   guest    leaves the last device at work on the first one's memory
 *   verify   compares all contents with what they must be
 *   exit
 *
 * Each device has plain memory, mapped memory of each contents policy, mapped memory that all devices reach, and
 * memory that is mapped nowhere; the last device has nothing of its own and works on the first one's. All of a
 * buffer is one number, and the program knows which. Calls are made with whatever context is current, as the
 * driver allows.
 */
#include "../simcuda/programs/driver.h"
#include "lines.h"

enum { DEVICES_MAX = 8, BYTES = 2 << 20, WORDS = BYTES / 4, PLAIN, KEPT, DISCARDED, FILED, SHARED };
enum { KINDS = SHARED - PLAIN + 1 };

typedef struct {
    CUdeviceptr address;
    uint32_t value;
    bool is_set;
} Buffer;

typedef struct {
    CUcontext context;
    CUstream stream;
    CUevent event;
    CUfunction affine, fill;
    Buffer buffers[KINDS];
    CUhandle hidden;
} Device;

static Device all[DEVICES_MAX];
static int devices;
static uint64_t steps;
static uint32_t *host;

static void fail(const char *what, int device, uint64_t wanted, uint64_t got)
{
    printf("fail step %llu: %s of device %d: %llu, not %llu\n", (unsigned long long)steps, what, device,
        (unsigned long long)got, (unsigned long long)wanted);
    exit(1);
}

/* Any context will do for what comes next; which one it is changes all the time. */
static void wander(void)
{
    static unsigned turn;
    OK(cuCtxSetCurrent(all[turn++ % (unsigned)devices].context));
}

static void region(const char *tag, int contents)
{
    int (*begin)(const char *, int) = (int (*)(const char *, int))dlsym(RTLD_DEFAULT, "sublet_region_begin");
    if (begin != NULL && begin(tag, contents) != 0)
        fail("region", 0, 0, 1);
}

static void region_end(void)
{
    int (*end)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "sublet_region_end");
    if (end != NULL && end() != 0)
        fail("end of region", 0, 0, 1);
}

static CUhandle make_handle(int device)
{
    CUprop prop = driver_prop();
    CUhandle handle = 0;
    prop.location.id = device;
    OK(cuMemCreate(&handle, BYTES, &prop, 0));
    return handle;
}

static CUdeviceptr map_for(CUhandle handle, int first, int last)
{
    CUdeviceptr address = 0;
    CUaccess access[DEVICES_MAX];
    for (int i = first; i <= last; i++)
        access[i - first] = (CUaccess){{1, i}, 3};
    OK(cuMemAddressReserve(&address, BYTES, 0, 0, 0));
    OK(cuMemMap(address, BYTES, 0, handle, 0));
    OK(cuMemSetAccess(address, BYTES, access, (size_t)(last - first + 1)));
    return address;
}

static void set(Buffer *buffer, int device, uint32_t value)
{
    OK(cuMemsetD32Async(buffer->address, value, WORDS, all[device].stream));
    buffer->value = value;
    buffer->is_set = true;
}

/* Fills the memory of `handle` through a mapping that goes again. */
static void set_hidden(CUhandle handle, int device, uint32_t value)
{
    CUdeviceptr address = map_for(handle, device, device);
    OK(cuMemsetD32Async(address, value, WORDS, all[device].stream));
    OK(cuStreamSynchronize(all[device].stream));
    driver_unmap(address, BYTES);
}

static uint32_t hidden_value(int device)
{
    return 0x5ec2e7u + (uint32_t)device;
}

static void start_device(int device)
{
    CUmodule module = NULL;
    OK(cuDevicePrimaryCtxRetain(&all[device].context, device));
    OK(cuCtxSetCurrent(all[device].context));
    OK(cuStreamCreate(&all[device].stream, 1));
    OK(cuEventCreate(&all[device].event, 0));
    OK(cuModuleLoadData(&module, "image"));
    OK(cuModuleGetFunction(&all[device].affine, module, "affine_u32"));
    OK(cuModuleGetFunction(&all[device].fill, module, "fill_u32"));
}

static void make_memory(int device)
{
    static const struct {
        int kind, contents;
        const char *tag;
    } regions[] = {{KEPT, 0, "kept"}, {DISCARDED, 1, "scratch"}, {FILED, 2, "filed"}};
    Buffer *buffers = all[device].buffers;
    OK(cuCtxSetCurrent(all[device].context));
    OK(cuMemAlloc(&buffers[0].address, BYTES));
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
        region(regions[i].tag, regions[i].contents);
        CUhandle handle = make_handle(device);
        region_end();
        buffers[regions[i].kind - PLAIN].address = map_for(handle, device, device);
        OK(cuMemRelease(handle));
    }
    CUhandle shared = make_handle(device);
    buffers[SHARED - PLAIN].address = map_for(shared, 0, devices - 1);
    OK(cuMemRelease(shared));
    for (int kind = 0; kind < KINDS; kind++)
        set(&buffers[kind], device, (uint32_t)(1000 * device + kind));
    all[device].hidden = make_handle(device);
    set_hidden(all[device].hidden, device, hidden_value(device));
}

/* buffer = buffer * mul + add, by a kernel of `device`. */
static void work_on(Buffer *buffer, int device, uint32_t mul, uint32_t add)
{
    uint64_t count = WORDS;
    void *params[] = {&buffer->address, &mul, &add, &count};
    OK(cuLaunchKernel(all[device].affine, 1, 1, 1, 32, 1, 1, 0, all[device].stream, params, NULL));
    buffer->value = buffer->value * mul + add;
}

/* Memory that comes, is used by a device, and is freed immediately, while another context is current. */
static void use_and_free(int device)
{
    CUdeviceptr passing = 0;
    uint32_t value = (uint32_t)(steps * 7 + (uint64_t)device);
    uint64_t count = WORDS;
    void *params[] = {&passing, &value, &count};
    OK(cuCtxSetCurrent(all[device].context));
    OK(cuMemAlloc(&passing, BYTES));
    for (int i = 0; i < 3; i++)
        OK(cuLaunchKernel(all[device].fill, 1, 1, 1, 32, 1, 1, 0, all[device].stream, params, NULL));
    OK(cuCtxSetCurrent(steps % 3 == 0 ? NULL : all[(device + 1) % devices].context));
    OK(cuMemFree(passing));
}

static void step(void)
{
    int guest = devices - 1;
    for (int device = 0; device < guest; device++) {
        Buffer *buffers = all[device].buffers;
        wander();
        for (int kind = 0; kind < KINDS; kind++)
            work_on(&buffers[kind], device, 3, (uint32_t)steps + (uint32_t)kind);
        OK(cuEventRecord(all[device].event, all[device].stream));
    }
    for (int device = 0; device < guest; device++) {
        int next = (device + 1) % guest;
        wander();
        /* The next device's plain memory becomes what is here, with any context current. */
        OK(cuStreamWaitEvent(all[device].stream, all[next].event, 0));
        Buffer *from = &all[device].buffers[SHARED - PLAIN], *to = &all[next].buffers[0];
        OK(cuMemcpyDtoDAsync(to->address, from->address, BYTES, all[device].stream));
        to->value = from->value;
        OK(cuEventRecord(all[device].event, all[device].stream));
    }
    for (int device = 0; device < guest; device++)
        OK(cuStreamWaitEvent(all[guest].stream, all[device].event, 0));
    for (int device = 0; device < guest; device++)
        work_on(&all[device].buffers[SHARED - PLAIN], guest, 5, 1);
    OK(cuEventRecord(all[guest].event, all[guest].stream));
    for (int device = 0; device < guest; device++) {
        OK(cuStreamWaitEvent(all[device].stream, all[guest].event, 0));
        /* Also what the next device wrote into this one's plain memory. */
        int before = (device + guest - 1) % guest;
        OK(cuStreamWaitEvent(all[device].stream, all[before].event, 0));
    }
    use_and_free((int)(steps % (uint64_t)guest));
    steps++;
}

static void settle(void)
{
    for (int device = 0; device < devices; device++)
        OK(cuStreamSynchronize(all[device].stream));
}

static void check(const char *what, int device, CUdeviceptr address, uint32_t value)
{
    OK(cuMemcpyDtoHAsync(host, address, BYTES, all[device].stream));
    OK(cuStreamSynchronize(all[device].stream));
    for (int i = 0; i < WORDS; i++)
        if (host[i] != value)
            fail(what, device, value, host[i]);
}

static void verify(void)
{
    static const char *const names[] = {"plain", "kept", "discarded", "filed", "shared"};
    settle();
    for (int device = 0; device < devices - 1; device++) {
        OK(cuCtxSetCurrent(all[device].context));
        for (int kind = 0; kind < KINDS; kind++)
            if (kind != DISCARDED - PLAIN)
                check(names[kind], device, all[device].buffers[kind].address, all[device].buffers[kind].value);
        CUdeviceptr address = map_for(all[device].hidden, device, device);
        check("hidden", device, address, hidden_value(device));
        driver_unmap(address, BYTES);
    }
    printf("ok %llu\n", (unsigned long long)steps);
}

static void run(void)
{
    printf("ok running\n");
    while (!line_is_waiting())
        step();
    settle();
    printf("ok %llu\n", (unsigned long long)steps);
}

static void work_as_guest(void)
{
    for (int i = 0; i < 40; i++)
        work_on(&all[0].buffers[SHARED - PLAIN], devices - 1, 7, 3);
    printf("ok guest\n");
}

static void obey(const char *line)
{
    if (is(line, "run"))
        run();
    else if (is(line, "guest"))
        work_as_guest();
    else if (is(line, "verify"))
        verify();
    else if (!is(line, "stop"))
        exit(0);
}

int main(void)
{
    lines_begin();
    driver_load();
    OK(cuInit(0));
    OK(cuDeviceGetCount(&devices));
    if (devices < 2 || devices > DEVICES_MAX)
        fail("count", 0, 2, (uint64_t)devices);
    host = malloc(BYTES);
    for (int device = 0; device < devices; device++)
        start_device(device);
    for (int device = 0; device < devices - 1; device++)
        make_memory(device);
    settle();
    printf("ok ready\n");
    lines_obey(obey);
    return 0;
}
