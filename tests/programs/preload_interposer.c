/* A library between the program and the C library, as profilers are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

int getpagesize(void)
{
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "getpagesize");
    return next == getpagesize ? -1 : next() + 1;
}
