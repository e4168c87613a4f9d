/* A library that links the driver, and keeps the address of a function of it in a table. */
#include <stddef.h>
#include <stdint.h>

extern int cuInit(unsigned);
extern int cuDevicePrimaryCtxRetain(void **, int);
extern int cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(uint64_t *, size_t);
extern int cuMemFree_v2(uint64_t);

static int (*const volatile allocates[])(uint64_t *, size_t) = {cuMemAlloc_v2};

int direct_start(void)
{
    void *context = NULL;
    int code = cuInit(0);
    if (code == 0)
        code = cuDevicePrimaryCtxRetain(&context, 0);
    return code != 0 ? code : cuCtxSetCurrent(context);
}

int direct_allocate(uint64_t *address, size_t bytes, int by_table)
{
    return by_table ? allocates[0](address, bytes) : cuMemAlloc_v2(address, bytes);
}

int direct_free(uint64_t address)
{
    return cuMemFree_v2(address);
}
