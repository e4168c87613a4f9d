/* Registers device memory with made-up devices; the arguments say what happens, in order:
 *
 *   malloc                     8 MiB by libruntime.so
 *   device=NAME                opens the file dev/NAME of STAGE_DIR
 *   verbs | gdrapi             opens libibverbs.so.1 or libgdrapi.so.2 of STAGE_DIR
 *   reg=SYMBOL@VERSION | reg=SYMBOL   looks the function up, and registers the last memory
 *   bad-reg=SYMBOL | dereg | bad-dereg   registers in vain; ends the registration; tries to end it in vain
 *   host-reg=SYMBOL            registers host memory
 *   pin | unpin | close        the same by GDRCopy
 *   pause | resume             runs `$SUBLET_COMMAND` on the tenant
 *   stats                      prints JSON on a line of its own
 *
 * Every other line says what came of one word. */
#define _GNU_SOURCE
#include "attach.h"
#include "stage.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define BYTES ((size_t)8 << 20)

typedef struct {
    unsigned long h;
} gdr_mh_t;

static void *runtime, *verbs, *gdrapi, *context, *region;
static gdr_mh_t handle;
static uint64_t block;
static char host[4096];

static void *open_library(const char *name)
{
    void *library = dlopen(stage_file(name), RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("%s\n", dlerror());
        exit(1);
    }
    return library;
}

/* NCCL's way: the version is named. */
static void *found(const char *symbol)
{
    char name[128];
    const char *version = strchr(symbol, '@');
    snprintf(name, sizeof name, "%.*s", (int)(version == NULL ? strlen(symbol) : (size_t)(version - symbol)), symbol);
    return version == NULL ? dlsym(verbs, name) : dlvsym(verbs, name, version + 1);
}

static void *registers(const char *symbol, void *address, size_t length)
{
    void *function = found(symbol);
    if (function == NULL)
        return NULL;
    if (strstr(symbol, "iova") != NULL)
        return ((void *(*)(void *, void *, size_t, uint64_t, unsigned))function)(NULL, address, length, 0, 7);
    return ((void *(*)(void *, void *, size_t, int))function)(NULL, address, length, 7);
}

static int deregister(void *what)
{
    return ((int (*)(void *))found("ibv_dereg_mr@IBVERBS_1.1"))(what);
}

static void obey(const char *word)
{
    const char *value = strchr(word, '=');
    value = value == NULL ? "" : value + 1;
    if (strcmp(word, "malloc") == 0) {
        if (runtime == NULL)
            runtime = open_library("libruntime.so");
        printf("malloc %d\n", ((int (*)(uint64_t *, size_t))dlsym(runtime, "cudaMalloc"))(&block, BYTES));
    } else if (strncmp(word, "device=", 7) == 0) {
        char file[256];
        snprintf(file, sizeof file, "dev/%s", value);
        printf("device %d\n", open(stage_file(file), O_RDWR) >= 0);
    } else if (strcmp(word, "verbs") == 0) {
        verbs = open_library("libibverbs.so.1");
    } else if (strcmp(word, "gdrapi") == 0) {
        gdrapi = open_library("libgdrapi.so.2");
        context = ((void *(*)(void))dlsym(gdrapi, "gdr_open"))();
    } else if (strncmp(word, "reg=", 4) == 0) {
        region = registers(value, (void *)block, BYTES);
        printf("registered %d\n", region != NULL);
    } else if (strncmp(word, "bad-reg=", 8) == 0) {
        printf("registered %d\n", registers(value, (void *)block, 1) != NULL);
    } else if (strncmp(word, "host-reg=", 9) == 0) {
        printf("registered %d\n", registers(value, host, sizeof host) != NULL);
    } else if (strcmp(word, "dereg") == 0) {
        printf("deregistered %d\n", deregister(region));
    } else if (strcmp(word, "bad-dereg") == 0) {
        ((size_t *)region)[1] = 0;
        printf("deregistered %d\n", deregister(region));
        ((size_t *)region)[1] = BYTES;
    } else if (strcmp(word, "pin") == 0) {
        int (*pin)(void *, unsigned long, size_t, uint64_t, uint32_t, gdr_mh_t *) = dlsym(gdrapi, "gdr_pin_buffer");
        printf("pinned %d\n", pin(context, block, BYTES, 0, 0, &handle));
    } else if (strcmp(word, "unpin") == 0) {
        printf("unpinned %d\n", ((int (*)(void *, gdr_mh_t))dlsym(gdrapi, "gdr_unpin_buffer"))(context, handle));
    } else if (strcmp(word, "close") == 0) {
        printf("closed %d\n", ((int (*)(void *))dlsym(gdrapi, "gdr_close"))(context));
    } else if (strcmp(word, "pause") == 0 || strcmp(word, "resume") == 0) {
        char command[256];
        snprintf(command, sizeof command, "\"$SUBLET_COMMAND\" %s \"$SUBLET_TENANT\" 2>&1", word);
        fflush(stdout);
        printf("%s %d\n", word, system(command));
    } else if (strcmp(word, "stats") == 0) {
        attach_print_json("sublet_stats_json");
    } else {
        stage_unknown(word);
    }
}

int main(int count, char **words)
{
    return stage_obey(count, words, obey);
}
