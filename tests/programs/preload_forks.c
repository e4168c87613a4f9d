/* What a process has opened before it makes a child, and what the child then uses: preload_forks BEFORE USE HOW. Prints what the
 * child's calls answer, and how it ended. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void *opened(const char *file)
{
    char path[512];
    const char *folder = getenv("STAGE_DIR");
    snprintf(path, sizeof path, "%s/%s", folder, file);
    void *library = dlopen(access(path, R_OK) == 0 ? path : file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        printf("%s\n", dlerror());
    return library;
}

static void *function(void *library, const char *name)
{
    return library == NULL ? NULL : dlsym(library, name);
}

/* Calls a function without arguments that matter. */
static int answer(void *library, const char *name)
{
    int (*call)(int) = (int (*)(int))function(library, name);
    return call == NULL ? -1 : call(0);
}

static void open_before(const char *what)
{
    if (strcmp(what, "nvml") == 0)
        printf("nvml %d\n", answer(opened("libnvidia-ml.so.1"), "nvmlInit_v2"));
    else if (strcmp(what, "driver") == 0)
        printf("driver %d\n", function(opened("libcuda.so.1"), "cuGetProcAddress_v2") != NULL);
    else if (strcmp(what, "runtime") == 0)
        printf("runtime %d\n", function(opened("libruntime.so"), "cudaMalloc") != NULL);
    else if (strcmp(what, "nccl") == 0)
        printf("nccl %d\n", function(opened("libnccl3.so"), "ncclAllReduce") != NULL);
    else if (strcmp(what, "names") == 0)
        printf("names %d %d\n", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") != NULL, dlsym(RTLD_NEXT, "cuMemAlloc_v2") != NULL);
    fflush(stdout);
}

static int use(const char *what)
{
    uint64_t address = 0;
    int code;
    if (strcmp(what, "driver") == 0) {
        void *driver = opened("libcuda.so.1"), *context = NULL;
        int (*retain)(void **, int) = (int (*)(void **, int))function(driver, "cuDevicePrimaryCtxRetain");
        int (*current)(void *) = (int (*)(void *))function(driver, "cuCtxSetCurrent");
        int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))function(driver, "cuMemAlloc_v2");
        int device = -1;
        int (*get)(int *) = (int (*)(int *))function(driver, "cuCtxGetDevice");
        code = answer(driver, "cuInit");
        printf("no context %d, ", get(&device));
        if (code == 0)
            code = retain(&context, 0);
        if (code == 0)
            code = current(context);
        if (code == 0)
            code = allocate(&address, 4 << 20);
        printf("driver %d\n", code);
    } else {
        void *runtime = opened("libruntime.so");
        int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))function(runtime, "cudaMalloc");
        int (*release)(uint64_t) = (int (*)(uint64_t))function(runtime, "cudaFree");
        code = allocate(&address, 4 << 20);
        /* The driver refuses it, and writes that down. */
        printf("runtime %d, nothing %d, ", code, release(12345));
        printf("back %d\n", release(address));
    }
    fflush(stdout);
    return code;
}

static void await(pid_t child)
{
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child)
        exit(1);
    printf("ended %d\n", status);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "use") == 0)
        return use(argv[2]);
    const char *before = argv[1], *what = argv[2], *how = argv[3];
    char *again[] = {argv[0], "use", argv[2], NULL};
    int (*to_server)[2] = calloc(2, sizeof(int[2]));
    pid_t server = -1, child = -1;
    if (strcmp(how, "forkserver") == 0 && pipe(to_server[0]) == 0) {
        /* As Python's: the process that forks has opened nothing, and is asked later. */
        server = fork();
        if (server == 0) {
            char byte;
            if (read(to_server[0][0], &byte, 1) != 1)
                _exit(1);
            child = fork();
            if (child == 0)
                _exit(use(what));
            await(child);
            _exit(0);
        }
    }
    open_before(before);
    if (strcmp(how, "fork") == 0) {
        child = fork();
        if (child == 0)
            _exit(use(what));
    } else if (strcmp(how, "vfork") == 0) {
        child = vfork();
        if (child == 0) {
            execve(again[0], again, environ);
            _exit(127);
        }
    } else if (strcmp(how, "spawn") == 0) {
        if (posix_spawn(&child, again[0], NULL, NULL, again, environ) != 0)
            return 1;
    } else {
        if (write(to_server[0][1], "x", 1) != 1)
            return 1;
        child = server;
    }
    await(child);
    return 0;
}
