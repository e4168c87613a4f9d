/* Uses of the dynamic loader; the first argument chooses. Prints what does not depend on addresses. */
#define _GNU_SOURCE
#include "attach.h"
#include "file_of.h"
#include "stage.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int own_symbol(void)
{
    return 1;
}

static void *open_or_end(const char *name, int flags)
{
    void *handle = dlopen(name, flags);
    if (handle == NULL) {
        printf("%s: %s\n", name, dlerror());
        exit(1);
    }
    return handle;
}

static void by_default(void)
{
    int own = dlsym(RTLD_DEFAULT, "own_symbol") == (void *)own_symbol;
    void *library = open_or_end(stage_file("liblocal.so"), RTLD_NOW | RTLD_LOCAL);
    int local = dlsym(RTLD_DEFAULT, "local_answer") != NULL;
    int (*finds)(void) = (int (*)(void))dlsym(library, "local_finds_itself");
    printf("program finds its own %d, the local one %d\n", own, local);
    printf("library finds its own %d\n", finds());
}

static void by_version(void)
{
    void *versioned = dlvsym(RTLD_DEFAULT, "fopen", "GLIBC_2.2.5");
    void *other = dlvsym(RTLD_DEFAULT, "fopen", "GLIBC_9.9");
    printf("versioned %d, of another version %d, error %d\n", versioned != NULL, other != NULL, dlerror() != NULL);
    printf("dlvsym in libc %d\n", strncmp(file_of(dlsym(RTLD_DEFAULT, "dlvsym")), "libc.so", 7) == 0);
    void *driver = open_or_end("libcuda.so.1", RTLD_NOW);
    printf("driver by version %d\n", dlvsym(driver, "cuMemCreate", "NONE_1") != NULL);
}

static void other_namespace(void)
{
    void *math = dlmopen(LM_ID_NEWLM, "libm.so.6", RTLD_NOW);
    double (*cosine)(double) = (double (*)(double))dlsym(math, "cos");
    printf("cos %.1f\n", cosine(0.0));
    void *local = dlmopen(LM_ID_NEWLM, stage_file("liblocal.so"), RTLD_NOW);
    int (*answer)(void) = (int (*)(void))dlsym(local, "local_answer");
    int (*finds)(void) = (int (*)(void))dlsym(local, "local_finds_itself");
    printf("local %d, finds itself %d\n", answer(), finds());
    void *driver = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    void *found = driver == NULL ? NULL : dlsym(driver, "cuMemCreate");
    printf("driver %d, in the driver %d\n", driver != NULL, strcmp(file_of(found), "libcuda.so.1") == 0);
}

static void unrelated(void)
{
    void *math = open_or_end("libm.so.6", RTLD_NOW);
    double (*cosine)(double) = (double (*)(double))dlsym(math, "cos");
    printf("cos %.1f\n", cosine(0.0));
    void *again = open_or_end("libm.so.6", RTLD_NOW | RTLD_NOLOAD);
    printf("again %d\n", dlsym(again, "cos") == (void *)cosine);
    printf("not loaded %d\n", dlopen("libthere-is-none.so", RTLD_NOW) == NULL && dlerror() != NULL);
}

static int error_names(const char *name)
{
    const char *error = dlerror();
    return error != NULL && strstr(error, name) != NULL;
}

static void missing(void)
{
    void *driver = open_or_end("libcuda.so.1", RTLD_NOW);
    dlerror();
    void *none = dlsym(driver, "cuNoSuchFunction");
    int named = error_names("cuNoSuchFunction");
    printf("no such name: null %d, error names it %d, error read once %d\n", none == NULL, named, dlerror() == NULL);
    void *found = dlsym(driver, "cuMemCreate");
    printf("first driver function: found %d, error %d\n", found != NULL, dlerror() != NULL);
    /* A function that newer drivers have. */
    none = dlsym(driver, "cuMemBatchDecompressAsync");
    printf("driver lacks it: null %d, error names it %d\n", none == NULL, error_names("cuMemBatchDecompressAsync"));
    none = dlsym(driver, "cuNoSuchFunction");
    found = dlsym(driver, "cuMemRelease");
    printf("after a failure: found %d, error %d\n", none == NULL && found != NULL, dlerror() != NULL);
}

static int wrong_answers;

static void *look_up(void *argument)
{
    static const char *const names[] = {"cuMemCreate", "cuInit", "cuGetProcAddress_v2", "cuLaunchKernel"};
    void *driver = argument;
    for (int i = 0; i < 3000; i++) {
        int wrong = dlsym(driver, names[i % 4]) == NULL;
        wrong += dlsym(RTLD_DEFAULT, "own_symbol") != (void *)own_symbol;
        wrong += dlsym(RTLD_NEXT, "fopen") == NULL;
        wrong += dlsym(driver, "cuNoSuchFunction") != NULL || !error_names("cuNoSuchFunction");
        __atomic_fetch_add(&wrong_answers, wrong, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void *load_and_unload(void *argument)
{
    const char *path = argument;
    for (int i = 0; i < 300; i++) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        int (*answer)(void) = (int (*)(void))dlsym(library, "local_answer");
        __atomic_fetch_add(&wrong_answers, answer() != 42, __ATOMIC_RELAXED);
        dlclose(library);
    }
    return NULL;
}

static void threads(void)
{
    pthread_t thread[8];
    void *driver = open_or_end("libcuda.so.1", RTLD_NOW);
    const char *path = stage_file("liblocal.so");
    for (int i = 0; i < 8; i++)
        pthread_create(&thread[i], NULL, i < 6 ? look_up : load_and_unload, i < 6 ? driver : (void *)path);
    for (int i = 0; i < 8; i++)
        pthread_join(thread[i], NULL);
    printf("wrong answers %d\n", wrong_answers);
}

static void late(void)
{
    printf("loaded before %d\n", dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) != NULL);
    void *driver = open_or_end("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2");
    void *context = NULL;
    uint64_t address = 0;
    int code = init(0) + retain(&context, 0) + set(context) + allocate(&address, 100);
    printf("allocation %d %s\n", code, file_of((void *)allocate));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {{"default", by_default}, {"dlvsym", by_version}, {"dlmopen", other_namespace},
                 {"unrelated", unrelated}, {"missing", missing},  {"threads", threads},
                 {"late", late}};
    for (size_t i = 0; argc > 1 && i < sizeof modes / sizeof modes[0]; i++) {
        if (strcmp(argv[1], modes[i].name) == 0) {
            attach_if_asked();
            modes[i].run();
            return 0;
        }
    }
    return 2;
}
