/* Shared host memory as NCCL makes it, in NCCL's order of calls and in others. Built under a name of NCCL's, so that the calls are NCCL's.
 *
 *   preload_host_orders         prints the same with and without Sublet
 *   preload_host_orders files   says behind each order how many mappings are files of Sublet's */
#include "driver.h"

#include <pthread.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <unistd.h>

enum { HOST_NUMA = 3, PAGE = 2 << 20 };

static bool counts_files;

static CUprop host_prop(void)
{
    CUprop prop = driver_prop();
    prop.location = (CUlocation){HOST_NUMA, 0};
    return prop;
}

static CUhandle create(void)
{
    CUprop prop = host_prop();
    CUhandle handle = 0;
    OK(cuMemCreate(&handle, PAGE, &prop, 0));
    return handle;
}

static CUdeviceptr reserve_aligned(size_t bytes, size_t alignment)
{
    CUdeviceptr address = 0;
    OK(cuMemAddressReserve(&address, bytes, alignment, 0, 0));
    return address;
}

static CUdeviceptr reserve(void)
{
    return reserve_aligned(PAGE, PAGE);
}

static void map(CUdeviceptr address, CUhandle handle)
{
    CUaccess device = {{1, 0}, 3}, host = {{HOST_NUMA, 0}, 3};
    OK(cuMemMap(address, PAGE, 0, handle, 0));
    OK(cuMemSetAccess(address, PAGE, &device, 1));
    OK(cuMemSetAccess(address, PAGE, &host, 1));
}

static CUhandle import_of(CUhandle handle)
{
    int fd = -1;
    CUhandle import = 0;
    OK(cuMemExportToShareableHandle(&fd, handle, CU_FD, 0));
    OK(cuMemImportFromShareableHandle(&import, (void *)(uintptr_t)fd, CU_FD));
    close(fd);
    return import;
}

static void check(bool is_so, const char *what)
{
    if (!is_so) {
        printf("not so: %s\n", what);
        exit(1);
    }
}

/* Is it one memory for the device and the host, wherever it is mapped? */
static void use(CUdeviceptr written, CUdeviceptr seen)
{
    static unsigned char value, bytes[PAGE];
    volatile unsigned char *host = (volatile unsigned char *)(uintptr_t)seen;
    OK(cuMemsetD8(written, ++value, PAGE));
    OK(cuCtxSynchronize());
    check(host[0] == value && host[PAGE - 1] == value, "the host sees what the device wrote");
    host[PAGE / 2] = ++value;
    OK(cuMemcpyDtoH(bytes, written, PAGE));
    check(bytes[PAGE / 2] == value, "the device sees what the host wrote");
}

/* In the order of ncclCuMemHostFree. */
static void end(CUdeviceptr address)
{
    CUhandle handle = 0;
    size_t bytes = 0;
    OK(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address));
    OK(cuMemRelease(handle));
    OK(cuMemGetAddressRange(NULL, &bytes, address));
    check(bytes == PAGE, "the range is what was mapped");
    OK(cuMemUnmap(address, bytes));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(address, bytes));
}

static int files(void)
{
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, "sublet-host-memory") != NULL;
    fclose(maps);
    return count;
}

static void say(const char *order)
{
    if (counts_files)
        printf("%s: %d\n", order, files());
    else
        printf("%s\n", order);
}

static void make_and_end(const char *order)
{
    CUhandle handle = create();
    CUdeviceptr address = reserve();
    map(address, handle);
    use(address, address);
    say(order);
    end(address);
}

static void *reserve_elsewhere(void *unused)
{
    return (void *)(uintptr_t)reserve();
}

static void in_nccls_order(void)
{
    CUhandle handle = create(), retained = 0;
    CUdeviceptr address = reserve(), base = 0;
    CUprop prop;
    unsigned type = 0;
    map(address, handle);
    use(address, address);
    say("create, reserve, map");
    OK(cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)(address + PAGE / 2)));
    check(retained == handle, "the handle is found by an address");
    OK(cuMemRelease(retained));
    OK(cuMemGetAllocationPropertiesFromHandle(&prop, handle));
    check(prop.location.type == HOST_NUMA && prop.requested_handle_types == CU_FD, "properties");
    OK(cuMemGetAddressRange(&base, NULL, address + PAGE / 2));
    check(base == address, "the base of the range");
    printf("memory type: %d", cuPointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, address));
    printf(" %u\n", type);
    /* Unmapped and mapped again, where it was. */
    OK(cuMemUnmap(address, PAGE));
    map(address, handle);
    use(address, address);
    check(cuMemAddressFree(address, PAGE) != CU_OK, "a reservation with a mapping is not freed");
    end(address);
}

static void in_other_orders(void)
{
    CUdeviceptr first, second;
    CUhandle one, other;
    CUprop prop = driver_prop();

    first = reserve(), one = create(), map(first, one), use(first, first);
    say("reserve, create, map");
    end(first);

    one = create(), other = create(), first = reserve(), second = reserve();
    map(second, one), map(first, other), use(first, first), use(second, second);
    say("create twice, reserve twice, map crosswise");
    end(first), end(second);

    pthread_t thread;
    void *reserved = NULL;
    one = create();
    pthread_create(&thread, NULL, reserve_elsewhere, NULL);
    pthread_join(thread, &reserved);
    first = (CUdeviceptr)(uintptr_t)reserved;
    map(first, one), use(first, first);
    say("another thread reserves");
    end(first);

    one = create(), other = create(), first = reserve_aligned(2 * PAGE, 0), second = first + PAGE;
    map(first, one), map(second, other), use(first, first), use(second, second);
    say("two in one reservation");
    OK(cuMemUnmap(first, 2 * PAGE));
    OK(cuMemRelease(one));
    OK(cuMemRelease(other));
    OK(cuMemAddressFree(first, 2 * PAGE));

    one = create(), first = reserve_aligned(2 * PAGE, 0), map(first + PAGE, one), use(first + PAGE, first + PAGE);
    say("behind a hole");
    OK(cuMemUnmap(first + PAGE, PAGE));
    OK(cuMemRelease(one));
    OK(cuMemAddressFree(first, 2 * PAGE));

    /* As two ranks of one process do it. */
    one = create(), first = reserve(), map(first, one);
    other = import_of(one), second = reserve(), map(second, other), use(first, second), use(second, first);
    say("imported where it was made");
    end(first), use(second, second), end(second);

    one = create(), other = import_of(one), first = reserve(), map(first, one);
    second = reserve(), map(second, other), use(first, second);
    say("imported before it is mapped");
    end(first), end(second);

    /* As NCCL looks whether it can have such memory. */
    one = create();
    OK(cuMemRelease(one));
    OK(cuMemCreate(&one, PAGE, &prop, 0));
    first = driver_map(one, PAGE);
    say("released, then device memory");
    end(first);

    one = create();
    OK(cuMemCreate(&other, PAGE, &prop, 0));
    second = driver_map(other, PAGE), first = reserve(), map(first, one), use(first, first);
    say("device memory in between");
    end(second), end(first);

    one = create(), first = reserve();
    OK(cuMemAddressFree(first, PAGE));
    OK(cuMemRelease(one));
    say("never mapped");

    /* NCCL connects at the first collective, which may be captured. */
    CUstream stream;
    CUgraph graph;
    OK(cuStreamCreate(&stream, 1));
    OK(cuStreamBeginCapture(stream, 0));
    one = create(), first = reserve(), map(first, one);
    OK(cuStreamEndCapture(stream, &graph));
    use(first, first);
    say("during a capture");
    OK(cuStreamBeginCapture(stream, 0));
    end(first);
    OK(cuStreamEndCapture(stream, &graph));

    one = create(), first = reserve_aligned(PAGE, 64 * PAGE), map(first, one), use(first, first);
    check(first % (64 * PAGE) == 0, "as aligned as it was wanted");
    say("aligned");
    end(first);
}

static void with_limits(void)
{
    struct rlimit none, most;
    getrlimit(RLIMIT_FSIZE, &none);
    most = (struct rlimit){PAGE, none.rlim_max};
    setrlimit(RLIMIT_FSIZE, &most);
    make_and_end("files as large are not allowed");
    setrlimit(RLIMIT_FSIZE, &none);
    getrlimit(RLIMIT_NOFILE, &none);
    int last = dup(0);
    close(last);
    most = (struct rlimit){(rlim_t)last + 10, none.rlim_max};
    setrlimit(RLIMIT_NOFILE, &most);
    make_and_end("few descriptors are left");
    setrlimit(RLIMIT_NOFILE, &none);
    make_and_end("without these limits");
}

int main(int count, char **words)
{
    counts_files = count > 1;
    driver_start();
    in_nccls_order();
    in_other_orders();
    with_limits();
    say("in the end");
    return 0;
}
