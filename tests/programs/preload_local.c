/* A library that is loaded for itself alone, and looks for its own function. */
#define _GNU_SOURCE
#include <dlfcn.h>

int local_answer(void)
{
    return 42;
}

int local_finds_itself(void)
{
    return dlsym(RTLD_DEFAULT, "local_answer") == (void *)local_answer;
}
