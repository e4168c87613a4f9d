/* Attaches, when the variable SUBLET_ATTACH names libsublet.so, as a program does that could not set
 * LD_PRELOAD. */
#ifndef SUBLET_TEST_ATTACH_H
#define SUBLET_TEST_ATTACH_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void *attach_library; /* RTLD_DEFAULT, which is null, where it is preloaded. */

/* A function of libsublet.so. */
static inline void *attach_symbol(const char *name)
{
    void *found = dlsym(attach_library, name);
    if (found == NULL) {
        printf("no %s: %s\n", name, dlerror());
        exit(1);
    }
    return found;
}

static inline void attach_open(void)
{
    attach_library = dlopen(getenv("SUBLET_ATTACH"), RTLD_NOW | RTLD_GLOBAL);
    if (attach_library == NULL) {
        printf("no libsublet.so: %s\n", dlerror());
        exit(1);
    }
}

static inline int attach_to(const char *tenant)
{
    return ((int (*)(const char *))attach_symbol("sublet_attach"))(tenant);
}

static inline void attach_if_asked(void)
{
    if (getenv("SUBLET_ATTACH") == NULL)
        return;
    attach_open();
    int code = attach_to(NULL);
    if (code != 0) {
        printf("attach: %d %s\n", code, ((const char *(*)(void))attach_symbol("sublet_last_error"))());
        exit(1);
    }
}

/* Prints a function's JSON on a line of its own. */
static inline void attach_print_json(const char *function)
{
    static char text[1 << 20];
    int64_t length = ((int64_t(*)(char *, size_t))attach_symbol(function))(text, sizeof text);
    printf("%s\n", length < 0 || length >= (int64_t)sizeof text ? "null" : text);
}

#endif
