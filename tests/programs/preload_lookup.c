/* Reads questions, `symbol base version flags` a line, and says which library holds the function that each
 * road leads to, whether the roads agree, and what code and status the last one gave. EMPTY is the empty
 * name, NULL a null one, NOWHERE a null place for the answer, - no symbol. */
#define _GNU_SOURCE
#include "attach.h"
#include "file_of.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*lookup_v2)(const char *, void **, int, uint64_t, int *);
typedef int (*lookup_v1)(const char *, void **, int, uint64_t);

static int agree(void *const found[4])
{
    void *first = NULL;
    for (int i = 0; i < 4; i++) {
        if (found[i] == NULL)
            continue;
        if (first != NULL && found[i] != first)
            return 0;
        first = found[i];
    }
    return 1;
}

int main(void)
{
    attach_if_asked();
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    lookup_v2 by_table = (lookup_v2)dlsym(driver, "cuGetProcAddress_v2");
    lookup_v1 by_old_table = (lookup_v1)dlsym(driver, "cuGetProcAddress");
    char symbol[128], base[128];
    int version;
    unsigned long flags;
    if (init(0) != 0)
        return 1;
    while (scanf("%127s %127s %d %lu", symbol, base, &version, &flags) == 4) {
        void *found[4] = {NULL, NULL, NULL, NULL};
        int status = -1;
        const char *name = base;
        void **place = &found[1], **old_place = &found[2];
        if (strcmp(base, "EMPTY") == 0)
            name = "";
        if (strcmp(base, "NULL") == 0)
            name = NULL;
        if (strcmp(base, "NOWHERE") == 0) {
            name = "cuMemCreate";
            place = old_place = NULL;
        }
        if (strcmp(symbol, "-") != 0) {
            found[0] = dlsym(driver, symbol);
            found[3] = dlsym(RTLD_DEFAULT, symbol);
        }
        int code = by_table(name, place, version, flags, &status);
        int old_code = by_old_table(name, old_place, version, flags);
        printf("%s %s %s %s %s code %d %d status %d\n", file_of(found[0]), file_of(found[1]), file_of(found[2]),
               file_of(found[3]), agree(found) ? "same" : "different", code, old_code, status);
    }
    return 0;
}
