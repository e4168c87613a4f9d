/* A device works on plain memory of another by peer access, one word an argument:
 *
 *   late      access was enabled before Sublet came, and memory is allocated afterwards
 *   never     access was never enabled: an attempt to enable it still succeeds
 *   opened    access was enabled before memory of another process is opened; opened-old: by the form of CUDA 4
 *   opening   access is enabled after it was opened
 *   meanwhile access is enabled while one thread allocates and another frees
 *
 * It prints the same with and without Sublet. */
#include "driver.h"
#include "attach.h"
#include "inside.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { BYTES = 4 << 20, WORDS = BYTES / 4 };

static CUcontext contexts[2];

static void start(void)
{
    driver_load();
    OK(cuInit(0));
    for (int device = 0; device < 2; device++)
        OK(cuDevicePrimaryCtxRetain(&contexts[device], device));
}

/* Fills by a kernel of device 1. */
static CUresult fill_from_1(CUdeviceptr data, uint32_t value)
{
    CUmodule module = NULL;
    CUfunction kernel = NULL;
    CUstream stream = NULL;
    uint64_t count = WORDS;
    void *params[] = {&data, &value, &count};
    OK(cuCtxSetCurrent(contexts[1]));
    OK(cuModuleLoadData(&module, "image"));
    OK(cuModuleGetFunction(&kernel, module, "fill_u32"));
    OK(cuStreamCreate(&stream, 1));
    OK(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
    CUresult code = cuStreamSynchronize(stream);
    return code;
}

static CUresult enable(void)
{
    OK(cuCtxSetCurrent(contexts[1]));
    return cuCtxEnablePeerAccess(contexts[0], 0);
}

static void print_word(const char *what, CUdeviceptr data, CUresult code)
{
    uint32_t word = 0;
    OK(cuCtxSetCurrent(contexts[0]));
    OK(cuMemcpyDtoH(&word, data + BYTES - 4, 4));
    printf("%s: %s, word %u\n", what, driver_error(code), word);
}

static void late(void)
{
    CUdeviceptr data = 0;
    start();
    OK(enable());
    attach_if_asked();
    OK(cuCtxSetCurrent(contexts[0]));
    OK(cuMemAlloc(&data, BYTES));
    print_word("late", data, fill_from_1(data, 6));
    OK(cuMemFree(data));
}

static void never(void)
{
    start();
    attach_if_asked();
    printf("never: %s\n", driver_error(enable()));
    printf("never: %s\n", driver_error(enable()));
}

/* Another process's memory, opened here with device 0 current. */
static void opened(const char *what, int by_old_form, int is_enabled_before)
{
    int there[2], back[2];
    CUipcMemHandle handle;
    CUdeviceptr data = 0;
    if (pipe(there) != 0 || pipe(back) != 0)
        exit(1);
    fflush(stdout);
    pid_t owner = fork();
    if (owner == 0) {
        char byte = 0;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        start();
        OK(cuCtxSetCurrent(contexts[0]));
        OK(cuMemAlloc(&data, BYTES));
        OK(cuMemsetD8(data, 0, BYTES));
        OK(cuCtxSynchronize());
        OK(cuIpcGetMemHandle(&handle, data));
        if (write(there[1], &handle, sizeof handle) != sizeof handle || read(back[0], &byte, 1) != 1)
            _exit(1);
        _exit(0);
    }
    start();
    if (read(there[0], &handle, sizeof handle) != sizeof handle)
        exit(1);
    if (is_enabled_before)
        OK(enable());
    OK(cuCtxSetCurrent(contexts[0]));
    CUresult (*open)(CUdeviceptr *, CUipcMemHandle, unsigned) = cuIpcOpenMemHandle;
    if (by_old_form)
        *(void **)&open = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuIpcOpenMemHandle");
    OK(open(&data, handle, 1));
    if (!is_enabled_before)
        OK(enable());
    print_word(what, data, fill_from_1(data, 8));
    OK(cuCtxSetCurrent(contexts[0]));
    OK(cuIpcCloseMemHandle(data));
    if (write(back[1], "x", 1) != 1 || waitpid(owner, NULL, 0) != owner)
        exit(1);
    OK(cuCtxSetCurrent(contexts[1]));
    OK(cuDevicePrimaryCtxRelease(1));
    OK(cuDevicePrimaryCtxRelease(0));
}

enum { BLOCKS = 12 };
static CUdeviceptr blocks[BLOCKS];
static atomic_int made, is_over;

static void *allocate_all(void *unused)
{
    OK(cuCtxSetCurrent(contexts[0]));
    for (int index = 0; index < BLOCKS; index++) {
        OK(cuMemAlloc(&blocks[index], BYTES));
        atomic_store(&made, index + 1);
    }
    return unused;
}

static void *allocate_and_free(void *unused)
{
    CUdeviceptr data = 0;
    OK(cuCtxSetCurrent(contexts[0]));
    while (!atomic_load(&is_over)) {
        OK(cuMemAlloc(&data, BYTES));
        OK(cuMemFree(data));
    }
    return unused;
}

static void meanwhile(void)
{
    pthread_t threads[2];
    start();
    if (pthread_create(&threads[0], NULL, allocate_all, NULL) != 0 || pthread_create(&threads[1], NULL, allocate_and_free, NULL) != 0)
        exit(1);
    while (atomic_load(&made) < BLOCKS / 2)
        ;
    OK(enable());
    atomic_store(&is_over, 1);
    for (int index = 0; index < 2; index++)
        pthread_join(threads[index], NULL);
    for (int index = 0; index < BLOCKS; index++)
        OK(fill_from_1(blocks[index], 9));
    print_word("meanwhile", blocks[BLOCKS - 1], 0);
}

int main(int count, char **words)
{
    inside_deadline(20);
    if (count != 2)
        return 1;
    if (strcmp(words[1], "late") == 0)
        late();
    else if (strcmp(words[1], "never") == 0)
        never();
    else if (strcmp(words[1], "opened") == 0)
        opened("opened", 0, 1);
    else if (strcmp(words[1], "opened-old") == 0)
        opened("opened", 1, 1);
    else if (strcmp(words[1], "opening") == 0)
        opened("opening", 0, 0);
    else if (strcmp(words[1], "meanwhile") == 0)
        meanwhile();
    return 0;
}
