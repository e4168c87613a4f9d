/* What a library is told of its small allocations, and what it may do with them, in orders that a library can have. Built twice: as a library that calls
 * itself NCCL, which does it all, and with MAIN as the program that calls it. It prints the same with and without Sublet. */
#ifdef MAIN

int like_nccl(void);

int main(void)
{
    return like_nccl();
}

#else

#include "driver.h"
#include "inside.h"

enum { UNIT = 2 << 20, QUESTIONS = 10, FLAT_UNITS = 32 };

/* Type, managed, device, IPC, start, size, mapped, kinds of handles, pool; and the buffer's number. */
static const int asked[QUESTIONS] = {2, 8, 9, 10, 11, 12, 13, 14, 17, 7};

static uint64_t numbers[8];
static int kinds;

/* Addresses are told by where they lie in their own reservation, whose numbers differ from run to run. */
static void tell(const char *when, const char *name, CUdeviceptr reserved, CUdeviceptr address)
{
    printf("%s, %s:", when, name);
    for (int i = 0; i < QUESTIONS; i++) {
        uint64_t value = 0;
        /* The driver alone knows the buffer's number, so that question waits for memory that is away. */
        if (asked[i] == 7 && strcmp(when, "away") == 0)
            continue;
        CUresult code = cuPointerGetAttribute(&value, asked[i], address);
        if (asked[i] == 7)
            numbers[kinds++ % 8] = value;
        else
            printf(" %d=%d,%llx", asked[i], code, (unsigned long long)(asked[i] == 11 ? value - reserved : value));
    }
    for (int device = 0; device < 2; device++) {
        uint64_t right = 9;
        CUlocation place = {1, device};
        CUresult code = cuMemGetAccess(&right, &place, address);
        printf(" right %d,%llu", code, (unsigned long long)right);
    }
    CUdeviceptr start = 0;
    size_t size = 0;
    CUresult code = cuMemGetAddressRange(&start, &size, address);
    CUhandle handle = 0;
    printf(" range %d,%llx,%zx", code, (unsigned long long)(code == CU_OK ? start - reserved : 0), size);
    code = cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address);
    CUprop prop;
    memset(&prop, 0, sizeof prop);
    printf(" retained %d", code);
    if (code == CU_OK) {
        code = cuMemGetAllocationPropertiesFromHandle(&prop, handle);
        printf(" of %d,%d,%d", code, prop.requested_handle_types, prop.location.id);
        OK(cuMemRelease(handle));
    }
    CUipcMemHandle ipc;
    printf(" legacy %d\n", cuIpcGetMemHandle(&ipc, address));
}

static CUhandle make(int units)
{
    CUprop prop = driver_prop();
    CUhandle handle = 0;
    OK(cuMemCreate(&handle, (size_t)units * UNIT, &prop, 0));
    return handle;
}

static CUdeviceptr reserve(int units)
{
    CUdeviceptr address = 0;
    OK(cuMemAddressReserve(&address, (size_t)units * UNIT, UNIT, 0, 0));
    return address;
}

static void place(CUdeviceptr address, CUhandle handle, int units, int device)
{
    CUaccess access = {{1, device}, 3};
    OK(cuMemMap(address, (size_t)units * UNIT, 0, handle, 0));
    OK(cuMemSetAccess(address, (size_t)units * UNIT, &access, 1));
}

static void put(CUdeviceptr address, uint64_t value)
{
    OK(cuMemcpyHtoD(address, &value, sizeof value));
}

static uint64_t get(CUdeviceptr address)
{
    uint64_t value = 0;
    OK(cuMemcpyDtoH(&value, address, sizeof value));
    return value;
}

/* Memory that NCCL registers as a window: under the function's own name, which NCCL calls for itself too. */
int pncclMemAlloc(CUhandle *made, CUdeviceptr *address)
{
    CUprop prop = driver_prop();
    volatile CUresult code = cuMemCreate(made, UNIT, &prop, 0);
    if (code == CU_OK)
        code = cuMemAddressReserve(address, UNIT, UNIT, 0, 0);
    if (code == CU_OK)
        place(*address, *made, 1, 0);
    return code;
}

static void windows(CUdeviceptr *flat, CUdeviceptr *own)
{
    CUhandle handle = 0, retained = 0;
    *flat = reserve(FLAT_UNITS);
    OK(pncclMemAlloc(&handle, own));
    put(*own, 77);
    OK(cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)*own));
    place(*flat + 5 * UNIT, retained, 1, 0);
    OK(cuMemRelease(retained));
    OK(cuMemRelease(handle));
    /* A resource window has no addresses of its own. */
    handle = make(1);
    place(*flat + 6 * UNIT, handle, 1, 0);
    put(*flat + 6 * UNIT, 78);
    OK(cuMemRelease(handle));
}

int like_nccl(void)
{
    inside_deadline(300);
    driver_start();
    CUhandle first = make(1), second = make(2), third = make(1), fourth = make(1);
    CUdeviceptr a = reserve(1), b = reserve(2), c = reserve(1), d = reserve(1), flat, own, own_start = 0;
    /* Each where the next might have been expected. */
    place(a, fourth, 1, 0);
    place(b, second, 2, 0);
    place(c, first, 1, 0);
    printf("rights to nothing: %d, mapped twice: %d, at an offset: %d, too long: %d, too short: %d\n",
        cuMemSetAccess(d, UNIT, &(CUaccess){{1, 0}, 3}, 1), cuMemMap(a, UNIT, 0, third, 0),
        cuMemMap(d, UNIT, UNIT, third, 0), cuMemMap(b + UNIT, 2 * UNIT, 0, third, 0),
        cuMemMap(d, UNIT, 0, second, 0));
    /* Rights of one alone, and less of them. */
    OK(cuMemSetAccess(b, 2 * UNIT, &(CUaccess){{1, 1}, 1}, 1));
    put(a, 71), put(b, 72), put(b + UNIT, 73), put(c, 74);
    /* In use, and mapped once more. */
    place(d, first, 1, 0);
    printf("the same: %llu\n", (unsigned long long)get(d));
    windows(&flat, &own);
    printf("unmapped by half: %d, freed while mapped: %d\n", cuMemUnmap(b, UNIT), cuMemAddressFree(b, 2 * UNIT));
    for (int turn = 0; turn < 3; turn++) {
        const char *when = turn == 1 ? "away" : "here";
        if (turn == 1)
            inside_pause();
        kinds = 0;
        tell(when, "the first", a, a + 64);
        tell(when, "the second", b, b + UNIT + 64);
        tell(when, "the third", c, c);
        tell(when, "the same", d, d);
        if (turn == 0) {
            int different = 0;
            for (int i = 0; i < 3; i++)
                different += numbers[i] != numbers[(i + 1) % 3];
            printf("%d numbers of buffers differ\n", different);
        }
        if (turn == 1)
            inside_resume();
        printf("%llu %llu %llu %llu %llu, windows %llu %llu %llu\n", (unsigned long long)get(a), (unsigned long long)get(b),
            (unsigned long long)get(b + UNIT), (unsigned long long)get(c), (unsigned long long)get(d),
            (unsigned long long)get(own), (unsigned long long)get(flat + 5 * UNIT), (unsigned long long)get(flat + 6 * UNIT));
    }
    /* Addresses that are kept, with nothing mapped. */
    OK(cuMemUnmap(d, UNIT));
    tell("unmapped", "the same", d, d + 64);
    place(d, first, 1, 0);
    /* The driver has something there still. */
    OK(cuMemUnmap(a, UNIT));
    uint64_t right = 9;
    CUresult range = cuMemGetAddressRange(&own_start, 0, a), access = cuMemGetAccess(&right, &(CUlocation){1, 0}, a);
    printf("unmapped, the first: %d %d, %llu\n", range, access, (unsigned long long)right);
    place(a, fourth, 1, 0);
    printf("mapped again: %llu\n", (unsigned long long)get(a));
    printf("mapped again: %llu\n", (unsigned long long)get(d));
    OK(cuMemUnmap(flat + 5 * UNIT, 2 * UNIT));
    OK(cuMemAddressFree(flat, (size_t)FLAT_UNITS * UNIT));
    driver_unmap(own, UNIT);
    driver_unmap(a, UNIT);
    driver_unmap(b, 2 * UNIT);
    driver_unmap(c, UNIT);
    driver_unmap(d, UNIT);
    printf("nothing is there: %d\n", cuMemRetainAllocationHandle(&first, (void *)(uintptr_t)a));
    return 0;
}

#endif
