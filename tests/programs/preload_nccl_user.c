/* A library that links NCCL, as libtorch_cuda.so does. */
#include <stddef.h>

int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);

int use_nccl(int count)
{
    return ncclAllReduce(NULL, NULL, (size_t)count, 7, 0, NULL, NULL);
}
