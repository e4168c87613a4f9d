/* A library that asks for names without naming a library: its own dependencies are searched for it. */
#include <dlfcn.h>
#include <stddef.h>

int asks(const char *name)
{
    return dlsym(RTLD_DEFAULT, name) != NULL;
}
