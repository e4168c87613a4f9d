/* A library that reaches the driver as NVIDIA's CUDA runtime does: by a table of functions that it fills at
 * its first use, through dlopen, dlsym and cuGetProcAddress_v2. With -DON_THE_HEAP the table is not in its
 * static data; with -DEARLY it is filled as the library is loaded. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct table {
    int (*lookup)(const char *, void **, int, uint64_t, int *);
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*allocate)(uint64_t *, size_t);
    int (*give_back)(uint64_t);
    int (*set)(uint64_t, unsigned, size_t);
    int (*read)(void *, uint64_t, size_t);
};

#ifdef ON_THE_HEAP
static struct table *functions;
#else
static struct table functions[1];
#endif
static int is_up;

static void *ask(const char *name)
{
    void *found = NULL;
    functions->lookup(name, &found, 12000, 0, NULL);
    return found;
}

static int start(void)
{
    if (is_up)
        return 0;
#ifdef ON_THE_HEAP
    functions = calloc(1, sizeof *functions);
#endif
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver == NULL)
        return 35;
    functions->lookup = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(driver, "cuGetProcAddress_v2");
    functions->init = ask("cuInit");
    functions->retain = ask("cuDevicePrimaryCtxRetain");
    functions->set_current = ask("cuCtxSetCurrent");
    functions->allocate = ask("cuMemAlloc");
    functions->give_back = ask("cuMemFree");
    functions->set = ask("cuMemsetD32");
    functions->read = ask("cuMemcpyDtoH");
    void *context = NULL;
    int code = functions->init(0);
    if (code == 0)
        code = functions->retain(&context, 0);
    if (code == 0)
        code = functions->set_current(context);
    is_up = code == 0;
    return code;
}

#ifdef EARLY
__attribute__((constructor)) static void early(void)
{
    start();
}
#endif

int cudaMalloc(uint64_t *address, size_t bytes)
{
    int code = start();
    return code != 0 ? code : functions->allocate(address, bytes);
}

int cudaFree(uint64_t address)
{
    return functions->give_back(address);
}

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status)
{
    int code = start();
    return code != 0 ? code : functions->lookup(name, function, 12000, flags, status);
}

/* Sets all words, and reads one back. */
int runtime_set(uint64_t address, unsigned value, size_t words)
{
    return functions->set(address, value, words);
}

unsigned runtime_word(uint64_t address)
{
    unsigned value = 0;
    return functions->read(&value, address, sizeof value) == 0 ? value : ~0u;
}
