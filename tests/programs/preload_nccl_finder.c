/* Looks NCCL's functions up in a process that may have none, one or two, and says what it found.
 *
 *   nccl_finder [LIBRARY...]
 *
 * Each library is opened for itself. One that has `use_nccl` is called through it, any other is asked by
 * dlsym. The last lines say what the program finds without naming a library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);

static const char *found(void *address)
{
    Dl_info info;
    if (address == NULL)
        return "nowhere";
    if (dladdr(address, &info) == 0)
        return "somewhere";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash == NULL ? info.dli_fname : slash + 1;
}

static void look(const char *how, void *handle)
{
    dlerror();
    void *address = dlsym(handle, "ncclAllReduce");
    const char *error = dlerror();
    printf("%s: %s, %s\n", how, found(address), error == NULL ? "no error" : "an error");
    if (dlsym(handle, "ncclSignal") != NULL)
        printf("%s: a function that no NCCL here has\n", how);
    dlerror();
}

int main(int count, char **words)
{
    for (int i = 1; i < count; i++) {
        void *library = dlopen(words[i], RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) {
            printf("%s\n", dlerror());
            return 1;
        }
        int (*use)(int) = (int (*)(int))dlsym(library, "use_nccl");
        all_reduce direct = (all_reduce)dlsym(library, "ncclAllReduce");
        if (use != NULL)
            printf("linked: %d\n", use(i));
        printf("by name: %s %d\n", found((void *)direct), direct(NULL, NULL, (size_t)i, 7, 0, NULL, NULL));
        int (*calls)(void) = (int (*)(void))dlsym(library, "nccl_calls");
        printf("calls: %d\n", calls());
    }
    look("default", RTLD_DEFAULT);
    look("next", RTLD_NEXT);
    look("program", dlopen(NULL, RTLD_NOW));
    return 0;
}
