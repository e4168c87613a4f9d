/* A library whose name begins as NCCL's does, which asks for plain device memory as NCCL does when
 * NCCL_CUMEM_ENABLE=0. The result is read after the call, so that the call returns here. */
#include <stddef.h>
#include <stdint.h>

int nccl_like_allocate(int (*allocate)(uint64_t *, size_t), uint64_t *address, size_t bytes)
{
    volatile int code = allocate(address, bytes);
    return code;
}
