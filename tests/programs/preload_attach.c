/* Attaches to itself at some moment of its life; the arguments say what happens, in order:
 *
 *   attach | attach=TENANT     opens libsublet.so (SUBLET_ATTACH) where that is not done, and attaches
 *   runtime | direct           opens libruntime.so or libdirect.so of STAGE_DIR
 *   deep | deep-direct | deep-alone   opens libruntime.so or libdirect.so with an order of their own (RTLD_DEEPBIND);
 *                              the last asks nothing of libruntime.so
 *   namespace                  opens libruntime.so in a namespace of its own (dlmopen)
 *   malloc | malloc-direct | malloc-table     asks it for 8 MiB
 *   pause | resume             the tenant, and checks every byte of the runtime's memory after a resume
 *   outside                    runs `$SUBLET_COMMAND pause` on the tenant
 *   use=LIBRARY                opens a user of NCCL and calls it
 *   close=LIBRARY              opens a library, asks it for a symbol, and closes it
 *   default=NAME               looks NAME up without naming a library
 *   rights                     the rights of the page that the runtime's imports are in
 *   storm | calm               starts threads that load, look up and unload; ends them
 *   fork                       a child looks a symbol up and ends
 *   into-child                 a child obeys the words that follow, and the parent waits for it
 *   report | stats             prints JSON on a line of its own
 *
 * Every other line says what came of one word. */
#define _GNU_SOURCE
#include "attach.h"
#include "file_of.h"
#include "stage.h"

#include <link.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES ((size_t)8 << 20)
#define WORDS (BYTES / 4)

static void *runtime, *direct;
static uint64_t blocks[16];
static int block_count;

static void *opened(void *library)
{
    if (library == NULL) {
        printf("%s\n", dlerror());
        exit(1);
    }
    return library;
}

static void *open_file(const char *name)
{
    return opened(dlopen(stage_file(name), RTLD_LAZY | RTLD_LOCAL));
}

static void *open_deep(const char *name)
{
    return opened(dlopen(stage_file(name), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND));
}

static int runtime_malloc(void)
{
    uint64_t address = 0;
    int code = ((int (*)(uint64_t *, size_t))dlsym(runtime, "cudaMalloc"))(&address, BYTES);
    if (code == 0) {
        int (*set)(uint64_t, unsigned, size_t) = (int (*)(uint64_t, unsigned, size_t))dlsym(runtime, "runtime_set");
        code = set(address, 7000u + (unsigned)block_count, WORDS);
        blocks[block_count++] = address;
    }
    return code;
}

static int wrong_words(void)
{
    unsigned (*word)(uint64_t) = (unsigned (*)(uint64_t))dlsym(runtime, "runtime_word");
    int wrong = 0;
    for (int i = 0; i < block_count; i++)
        for (size_t at = 0; at < WORDS; at += 4093)
            wrong += word(blocks[i] + 4 * at) != 7000u + (unsigned)i;
    return wrong;
}

static int direct_malloc(int by_table)
{
    uint64_t address = 0;
    int (*allocate)(uint64_t *, size_t, int) = (int (*)(uint64_t *, size_t, int))dlsym(direct, "direct_allocate");
    return allocate(&address, BYTES, by_table);
}

static int for_tenant(const char *function)
{
    return ((int (*)(const char *, uint32_t))attach_symbol(function))(NULL, 0);
}

static int in_child(void)
{
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        void *math = dlopen("libm.so.6", RTLD_NOW);
        int refused = attach_to(NULL) == 4;
        _exit(dlsym(math, "cos") == NULL || dlsym(RTLD_NEXT, "fopen") == NULL || !refused);
    }
    return waitpid(child, &status, 0) == child ? status : -1;
}

static void go_on_in_child(void)
{
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        return;
    exit(waitpid(child, &status, 0) == child && status == 0 ? 0 : 1);
}

/* The end of the part that the loader makes read-only, of the library that it looks at. */
static int find_relro(struct dl_phdr_info *info, size_t size, void *data)
{
    if (strstr(info->dlpi_name, "libruntime.so") == NULL)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO)
            *(unsigned long *)data = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    return 1;
}

static void print_rights(void)
{
    unsigned long address = 0, start = 0, end = 0;
    char line[4096], rights[8] = "none";
    dl_iterate_phdr(find_relro, &address);
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps) != NULL)
        if (sscanf(line, "%lx-%lx %7s", &start, &end, rights) == 3 && start <= address && address < end)
            break;
    fclose(maps);
    printf("rights %s\n", rights);
}

static int storm_goes_on, wrong_answers;
static pthread_t storm[6];

static void *look_up(void *argument)
{
    (void)argument;
    while (__atomic_load_n(&storm_goes_on, __ATOMIC_RELAXED)) {
        int wrong = dlsym(RTLD_NEXT, "fopen") == NULL;
        wrong += dlsym(RTLD_DEFAULT, "no_such_name_anywhere") != NULL;
        __atomic_fetch_add(&wrong_answers, wrong, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void *load_and_unload(void *argument)
{
    const char *name = argument;
    while (__atomic_load_n(&storm_goes_on, __ATOMIC_RELAXED)) {
        void *library = open_file(name);
        int (*answer)(void) = (int (*)(void))dlsym(library, "local_answer");
        int (*finds)(void) = (int (*)(void))dlsym(library, "relro_finds");
        int wrong = answer() != 42 || (finds != NULL && !finds());
        __atomic_fetch_add(&wrong_answers, wrong, __ATOMIC_RELAXED);
        dlclose(library);
    }
    return NULL;
}

static void begin_storm(void)
{
    storm_goes_on = 1;
    for (int i = 0; i < 6; i++)
        pthread_create(&storm[i], NULL, i < 2 ? look_up : load_and_unload, i % 2 ? "librelro.so" : "liblocal.so");
}

static void end_storm(void)
{
    __atomic_store_n(&storm_goes_on, 0, __ATOMIC_RELAXED);
    for (int i = 0; i < 6; i++)
        pthread_join(storm[i], NULL);
    printf("wrong answers %d\n", wrong_answers);
}

static void obey(const char *word)
{
    const char *value = strchr(word, '=');
    value = value == NULL ? NULL : value + 1;
    if (strncmp(word, "attach", 6) == 0) {
        if (attach_library == NULL)
            attach_open();
        int code = attach_to(value);
        printf("attach %d\n", code);
        if (code != 0)
            printf("%s\n", ((const char *(*)(void))attach_symbol("sublet_last_error"))());
    } else if (strcmp(word, "runtime") == 0) {
        runtime = open_file("libruntime.so");
    } else if (strcmp(word, "direct") == 0) {
        direct = open_file("libdirect.so");
        printf("direct %d\n", ((int (*)(void))dlsym(direct, "direct_start"))());
    } else if (strcmp(word, "deep") == 0) {
        runtime = open_deep("libruntime.so");
    } else if (strcmp(word, "deep-alone") == 0) {
        open_deep("libruntime.so");
    } else if (strcmp(word, "deep-direct") == 0) {
        direct = open_deep("libdirect.so");
        printf("direct %d\n", ((int (*)(void))dlsym(direct, "direct_start"))());
    } else if (strcmp(word, "namespace") == 0) {
        void *apart = opened(dlmopen(LM_ID_NEWLM, stage_file("libruntime.so"), RTLD_NOW));
        uint64_t address = 0;
        printf("apart %d\n", ((int (*)(uint64_t *, size_t))dlsym(apart, "cudaMalloc"))(&address, BYTES));
    } else if (strcmp(word, "malloc") == 0) {
        printf("malloc %d\n", runtime_malloc());
    } else if (strcmp(word, "malloc-direct") == 0 || strcmp(word, "malloc-table") == 0) {
        printf("%s %d\n", word, direct_malloc(strcmp(word, "malloc-table") == 0));
    } else if (strcmp(word, "pause") == 0) {
        printf("pause %d\n", for_tenant("sublet_pause_tenant"));
    } else if (strcmp(word, "resume") == 0) {
        printf("resume %d", for_tenant("sublet_resume_tenant"));
        printf(", wrong words %d\n", wrong_words());
    } else if (strcmp(word, "outside") == 0) {
        int status = system("\"$SUBLET_COMMAND\" pause \"$SUBLET_TENANT\" 2>&1");
        printf("outside %d\n", status);
    } else if (strncmp(word, "use=", 4) == 0) {
        void *user = open_file(value);
        int answer = ((int (*)(int))dlsym(user, "use_nccl"))(1);
        printf("nccl %d, by name %s\n", answer, file_of(dlsym(user, "ncclAllReduce")));
    } else if (strncmp(word, "close=", 6) == 0) {
        void *library = open_file(value);
        int found = dlsym(library, "local_answer") != NULL;
        printf("found %d, closed %d\n", found, dlclose(library));
    } else if (strncmp(word, "default=", 8) == 0) {
        printf("%s %s\n", value, file_of(dlsym(RTLD_DEFAULT, value)));
    } else if (strcmp(word, "rights") == 0) {
        print_rights();
    } else if (strcmp(word, "storm") == 0) {
        begin_storm();
    } else if (strcmp(word, "calm") == 0) {
        end_storm();
    } else if (strcmp(word, "fork") == 0) {
        printf("child %d\n", in_child());
    } else if (strcmp(word, "into-child") == 0) {
        go_on_in_child();
    } else if (strcmp(word, "report") == 0) {
        attach_print_json("sublet_attach_report_json");
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
