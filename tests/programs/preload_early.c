/* A library whose constructor looks functions up before other constructors have run. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

__attribute__((constructor)) static void early(void)
{
    int (*next)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "atoi");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *found = driver == NULL ? NULL : dlsym(driver, "cuMemCreate");
    printf("early: atoi %d, driver function found %d\n", next("7"), found != NULL);
}
