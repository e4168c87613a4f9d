/* A library whose name begins as NCCL's does, which starts NVML as NCCL does, where it finds one, and asks for plain device
 * memory as NCCL does when NCCL_CUMEM_ENABLE=0. The result is read after the call, so that the call returns here. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    char bytes[128];
} ncclUniqueId;

int ncclGetVersion(int *version)
{
    *version = 22809;
    return 0;
}

int ncclCommInitRank(void **communicator, int ranks, ncclUniqueId id, int rank)
{
    static char made;
    (void)id;
    *communicator = &made;
    return rank < ranks ? 0 : 4;
}

int nccl_like_allocate(int (*allocate)(uint64_t *, size_t), uint64_t *address, size_t bytes)
{
    void *management = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*start)(void) = management == NULL ? NULL : (int (*)(void))dlsym(management, "nvmlInit_v2");
    if (start != NULL && start() != 0)
        return 999;
    volatile int code = allocate(address, bytes);
    return code;
}
