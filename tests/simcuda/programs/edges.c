/* The edges: calls before cuInit, lookups of all kinds, work on memory that is gone, a forked child. */
#include "driver.h"

#include <sys/wait.h>
#include <unistd.h>

static void lookups(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    driver_lookup lookup = (driver_lookup)dlsym(library, "cuGetProcAddress_v2");
    void *found = NULL, *other = NULL;
    int status = -1;
    printf("lookup: empty name found %d\n", lookup("", &found, 0, 0, NULL) == CU_OK && found != NULL);
    lookup("cuNothing", &found, 12000, 0, &status);
    printf("lookup: unknown name: %d, status %d\n", found != NULL, status);
    lookup("cuMemCreate", &found, 9000, 0, &status);
    printf("lookup: too old: %d, status %d\n", found != NULL, status);
    OK(lookup("cuMemAlloc", &found, 12000, 0, &status));
    printf("lookup: cuMemAlloc is cuMemAlloc_v2: %d, status %d\n", found == dlsym(library, "cuMemAlloc_v2"), status);
    OK(lookup("cuGetProcAddress", &found, 12000, 0, &status));
    printf("lookup: itself: %d\n", found == (void *)lookup);
    OK(lookup("cuMemcpyAsync", &found, 12000, 1, &status));
    OK(lookup("cuMemcpyAsync", &other, 12000, 2, &status));
    printf("lookup: per-thread form differs: %d\n", found != other);
}

static void forked(void)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int count = 0;
        printf("forked: %s\n", driver_error(cuDeviceGetCount(&count)));
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, &status, 0);
}

/* No call of this family has flags yet: each refuses them, for every handle, and does nothing. */
static void flags(void)
{
    CUprop prop = driver_prop();
    CUhandle handle = 0, none = 12345;
    CUdeviceptr address = 0;
    size_t granule = 0;
    int fd = -1;
    OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
    OK(cuMemAddressReserve(&address, granule, 0, 0, 0));
    printf("flags: create %s\n", driver_error(cuMemCreate(&handle, granule, &prop, 1)));
    OK(cuMemCreate(&handle, granule, &prop, 0));
    printf("flags: map %s\n", driver_error(cuMemMap(address, granule, 0, handle, 1)));
    printf("flags: map nothing %s\n", driver_error(cuMemMap(address, granule, 0, none, 1)));
    printf("flags: export %s, descriptor %d\n", driver_error(cuMemExportToShareableHandle(&fd, handle, 1, 1)), fd);
    OK(cuMemMap(address, granule, 0, handle, 0));
    OK(cuMemUnmap(address, granule));
    OK(cuMemAddressFree(address, granule));
    OK(cuMemRelease(handle));
}

/* A kernel that meets unmapped memory makes the context useless, for good. */
static void poisoned(void)
{
    CUprop prop = driver_prop();
    CUhandle handle = 0;
    size_t granule = 0;
    OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
    OK(cuMemCreate(&handle, granule, &prop, 0));
    CUdeviceptr address = driver_map(handle, granule);
    OK(cuMemUnmap(address, granule));
    driver_fill(address, 1, 16, NULL);
    printf("poisoned: %s\n", driver_error(cuCtxSynchronize()));
    printf("poisoned: still: %s\n", driver_error(cuCtxSynchronize()));
    OK(cuMemAddressFree(address, granule));
    OK(cuMemRelease(handle));
}

/* Each may be NULL. */
static void figures(void)
{
    size_t free = 0, all = 0;
    printf("figures: %s", driver_error(cuMemGetInfo(NULL, &all)));
    printf(" %s", driver_error(cuMemGetInfo(&free, NULL)));
    printf(" %s, %s\n", driver_error(cuMemGetInfo(NULL, NULL)), free > 0 && free <= all ? "there" : "not there");
}

/* Memory goes while a kernel is queued that fills it: nobody waits for the kernel, and the context is lost. */
static void pulled(void)
{
    CUprop prop = driver_prop();
    CUhandle handle = 0;
    CUdeviceptr flag = 0;
    CUstream stream = NULL;
    void *params[] = {&flag};
    size_t granule = 0;
    OK(cuMemGetAllocationGranularity(&granule, &prop, 0));
    OK(cuMemCreate(&handle, granule, &prop, 0));
    CUdeviceptr address = driver_map(handle, granule);
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc(&flag, 4));
    OK(cuMemsetD32Async(flag, 0, 1, stream));
    driver_launch("spin_until_nonzero", stream, params);
    driver_fill(address, 1, 16, stream);
    printf("pulled: unmap %s\n", driver_error(cuMemUnmap(address, granule)));
    printf("pulled: %s\n", driver_error(cuStreamSynchronize(stream)));
    printf("pulled: still: %s\n", driver_error(cuMemsetD32Async(flag, 1, 1, stream)));
}

int main(int words, char **word)
{
    int count = 0;
    CUdeviceptr address = 0;
    driver_load();
    if (words > 1 && strcmp(word[1], "pulled") == 0) {
        driver_start();
        pulled();
        return 0;
    }
    printf("early: %s\n", driver_error(cuDeviceGetCount(&count)));
    OK(cuInit(0));
    printf("no context: %s\n", driver_error(cuMemAlloc(&address, 4)));
    lookups();
    driver_start();
    forked();
    figures();
    flags();
    poisoned();
    return 0;
}
