/* Memory larger than the device, as sublet.h offers it: six spans of one chunk go through two frames, with a whole pause between.
 * Prints what came. */
#include "driver.h"

#include <dirent.h>
#include <signal.h>
#include <sublet.h>

enum { CHUNK = 2 << 20, SPANS = 6, WAIT_MS = 30000 };

static char text[1 << 12];

static int has(const char *what)
{
    return strstr(text, what) != NULL;
}

/* Writes each span, or counts those whose last words are as it was written. The first is held meanwhile. */
static int visit(uint64_t pager, const uint64_t *spans, CUstream stream, int writes)
{
    int right = 0;
    for (int index = 0; index < SPANS; index++) {
        CUdeviceptr last = spans[index] + CHUNK - 16;
        unsigned char byte = 0;
        if (index == 0 && sublet_page_acquire(pager, &spans[index], 1, WAIT_MS) != 0)
            return -1;
        if (writes)
            OK(cuMemsetD32Async(spans[index], 0x01010101u * (unsigned)(index + 1), CHUNK / 4 - 3, stream));
        OK(cuMemcpyDtoHAsync(&byte, last, 1, stream));
        OK(cuStreamSynchronize(stream));
        right += byte == index + 1;
        if (index == 0 && sublet_page_release(pager, &spans[index], 1) != 0)
            return -1;
    }
    return right;
}

/* How many threads of ours there are, and how many of them take SIGTERM, SIGUSR1 or SIGALRM. */
static void count_threads(int *ours, int *open_to_signals)
{
    const unsigned long long asked = 1ull << (SIGTERM - 1) | 1ull << (SIGUSR1 - 1) | 1ull << (SIGALRM - 1);
    char path[300], line[256];
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task = readdir(tasks); task != NULL; task = readdir(tasks)) {
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        FILE *status = fopen(path, "r");
        unsigned long long blocked = 0;
        int is_ours = 0;
        /* It may have ended meanwhile. */
        while (status != NULL && fgets(line, sizeof line, status) != NULL) {
            is_ours |= strncmp(line, "Name:\tsublet-", 13) == 0;
            sscanf(line, "SigBlk: %llx", &blocked);
        }
        if (status != NULL)
            fclose(status);
        *ours += is_ours;
        *open_to_signals += is_ours && (blocked & asked) != asked;
    }
    closedir(tasks);
}

int main(void)
{
    uint64_t pager = 0, spans[SPANS] = {0};
    CUstream stream = NULL;
    int made = 0;
    driver_start();
    OK(cuStreamCreate(&stream, 1));
    int opened = sublet_page_open(0, 16 * (uint64_t)CHUNK, CHUNK, 2 * (uint64_t)CHUNK, &pager);
    for (int index = 0; index < SPANS; index++)
        made += sublet_page_alloc(pager, CHUNK - index, &spans[index]) == 0;
    printf("opened %d, spans %d, written %d\n", opened, made, visit(pager, spans, stream, 1));
    int announced = sublet_page_announce(pager, spans, 2);
    int paused = sublet_pause_tenant(NULL, 0), resumed = sublet_resume_tenant(NULL, 0);
    printf("announced %d, paused %d, resumed %d, read %d\n", announced, paused, resumed, visit(pager, spans, stream, 0));
    int ours = 0, open_to_signals = 0;
    count_threads(&ours, &open_to_signals);
    printf("threads %d, open to signals %d\n", ours >= 3, open_to_signals);
    int flushed = sublet_page_flush(pager, WAIT_MS);
    int64_t length = sublet_page_json(pager, text, sizeof text);
    printf("flushed %d, report %d %d %d\n", flushed, length > 0 && strlen(text) == (size_t)length,
           has("\"paged_bytes\":12582912"), has("\"frames_bytes\":4194304"));
    int too_many = sublet_page_acquire(pager, spans, 3, WAIT_MS);
    printf("too many %d %d\n", too_many == SUBLET_ERROR_ARGUMENT, strstr(sublet_last_error(), "6291456") != NULL);
    int too_much = sublet_page_alloc(pager, 8 * (uint64_t)CHUNK, &spans[0]);
    printf("for the host %d %d\n", too_much == SUBLET_ERROR_OUT_OF_HOST_MEMORY, strstr(sublet_last_error(), "SUBLET_HOST_BYTES_MAX") != NULL);
    int64_t planned = sublet_page_plan_json(pager, text, sizeof text);
    printf("planned %d %d\n", planned > 0 && strlen(text) == (size_t)planned, has("\"in_bytes\":"));
    int shrunk = sublet_page_set_frames(pager, CHUNK, WAIT_MS);
    printf("shrunk %d, read %d\n", shrunk, visit(pager, spans, stream, 0));
    int freed = sublet_page_free(pager, spans[0]);
    int again = sublet_page_free(pager, spans[0]) != 0;
    int closed = sublet_page_close(pager);
    printf("freed %d, not twice %d, closed %d, gone %d\n", freed, again, closed, sublet_page_json(pager, NULL, 0) == -1);
    return 0;
}
