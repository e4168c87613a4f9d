/* A library whose imports are all bound and made read-only as it is loaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

int local_answer(void)
{
    return 42;
}

int relro_finds(void)
{
    return dlsym(RTLD_DEFAULT, "malloc") != NULL && dlsym(RTLD_NEXT, "relro_finds") == NULL;
}
