/* Is a name there that no library of the process has? Asked by weak references, by handles and by pseudo-handles: before the driver is
 * in the process, when it was opened for its opener alone, when it came with a library that asks, and when it was opened for all. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WEAK __attribute__((weak))
WEAK int cuInit(unsigned);
WEAK int cuMemAlloc_v2(uint64_t *, size_t);
WEAK int cuMemGetInfo_v2(size_t *, size_t *);
WEAK int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
WEAK int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
WEAK int nvmlDeviceGetMemoryInfo(void *, void *);
WEAK void *ibv_reg_mr(void *, void *, size_t, int);

/* Kept in data too. */
int (*kept)(uint64_t *, size_t) = cuMemAlloc_v2;

static const char *const NAMES[] = {"cuInit", "cuMemAlloc_v2", "cuMemGetInfo_v2", "cuGetProcAddress_v2", "ncclAllReduce",
                                    "nvmlDeviceGetMemoryInfo", "ibv_reg_mr", "malloc", NULL};

static int has_driver(void)
{
    char line[1024];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps) != NULL)
        found |= strstr(line, "libcuda.so") != NULL;
    fclose(maps);
    return found;
}

static void ask(const char *when)
{
    void *program = dlopen(NULL, RTLD_LAZY);
    printf("%s:", when);
    for (int i = 0; NAMES[i] != NULL; i++) {
        printf(" %s %d", NAMES[i], dlsym(RTLD_DEFAULT, NAMES[i]) != NULL);
        int is_silent = dlerror() == NULL;
        printf("%d%d%d", is_silent, dlsym(RTLD_NEXT, NAMES[i]) != NULL, dlsym(program, NAMES[i]) != NULL);
    }
    printf("; driver %d\n", has_driver());
}

int main(int argc, char **argv)
{
    char path[512];
    printf("weak: %d %d %d %d %d %d %d %d\n", cuInit != NULL, cuMemAlloc_v2 != NULL, cuMemGetInfo_v2 != NULL,
           cuGetProcAddress_v2 != NULL, ncclAllReduce != NULL, nvmlDeviceGetMemoryInfo != NULL, ibv_reg_mr != NULL, kept != NULL);
    ask("nobody has it");
    if (argc < 2)
        return 0;
    if (strcmp(argv[1], "with-asker") == 0) {
        snprintf(path, sizeof path, "%s/libabsent_asker.so", getenv("STAGE_DIR"));
        int (*asks)(const char *) = (int (*)(const char *))dlsym(dlopen(path, RTLD_NOW | RTLD_LOCAL), "asks");
        printf("asker finds %d %d %d\n", asks("cuInit"), asks("cuMemAlloc_v2"), asks("ncclAllReduce"));
        ask("one library has it");
        return 0;
    }
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) == NULL)
        return 1;
    ask("its opener has it");
    dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    ask("all have it");
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(RTLD_DEFAULT, "cuInit");
    int (*info)(size_t *, size_t *) = (int (*)(size_t *, size_t *))dlsym(RTLD_DEFAULT, "cuMemGetInfo_v2");
    size_t available = 0, total = 0;
    printf("init %d, info without a context %d\n", init(0), info(&available, &total));
    return 0;
}
