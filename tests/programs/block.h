/* A block of device memory that is filled with one word, on a stream, and what Sublet says of calls about it. */
#ifndef SUBLET_TEST_BLOCK_H
#define SUBLET_TEST_BLOCK_H

#include "../simcuda/programs/driver.h"
#include "lines.h"

/* The stream that blocks are filled on. */
static CUstream stream;

/* Makes `device` current and has the process join its tenant, which its first memory does. */
static inline void block_begin(int device)
{
    CUcontext context = NULL;
    CUdeviceptr first = 0;
    driver_load();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc(&first, 2 << 20));
    OK(cuMemFree(first));
    printf("ok ready\n");
}

static inline void block_fill(CUdeviceptr block, size_t bytes, unsigned seed)
{
    OK(cuMemsetD32Async(block, seed, bytes / 4, stream));
    OK(cuStreamSynchronize(stream));
}

/* Does all of it hold `seed`, as far as its first, middle and last words tell? */
static inline bool block_holds(CUdeviceptr block, size_t bytes, unsigned seed)
{
    uint32_t words[3] = {0, 0, 0};
    OK(cuMemcpyDtoH(&words[0], block, 4));
    OK(cuMemcpyDtoH(&words[1], block + bytes / 2, 4));
    OK(cuMemcpyDtoH(&words[2], block + bytes - 4, 4));
    return words[0] == seed && words[1] == seed && words[2] == seed;
}

/* A function of Sublet's. */
static inline void *sublet(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL)
        driver_missing(name);
    return found;
}

static inline const char *sublet_says(void)
{
    return ((const char *(*)(void))sublet("sublet_last_error"))();
}

#endif
