/* Bound to the preload object without a driver: its functions answer as those of a driver that was not initialised. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

int cuMemCreate(uint64_t *, size_t, const void *, uint64_t);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

int main(void)
{
    uint64_t value = 0;
    int prop[8] = {1, 1, 1, 0}, status = 0;
    void *found = NULL;
    printf("cuMemCreate %d, cuMemAlloc %d, cuLaunchKernel %d, lookup %d\n", cuMemCreate(&value, 2 << 20, prop, 0),
           cuMemAlloc_v2(&value, 4), cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL),
           cuGetProcAddress_v2("cuInit", &found, 12000, 0, &status));
    printf("driver in the process %d\n", dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) != NULL);
    return 0;
}
