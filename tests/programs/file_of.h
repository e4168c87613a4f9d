/* Which file a function lies in. The including program defines _GNU_SOURCE. */
#ifndef SUBLET_TEST_FILE_OF_H
#define SUBLET_TEST_FILE_OF_H

#include <dlfcn.h>
#include <string.h>

static inline const char *file_of(void *address)
{
    Dl_info info;
    if (address == NULL || dladdr(address, &info) == 0)
        return "nowhere";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash == NULL ? info.dli_fname : slash + 1;
}

#endif
