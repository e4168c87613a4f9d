/* Memory by tag, contents while they are away, and contents that nobody needs: what sublet.h offers a program
 * that runs on. Prints what came. */
#include "driver.h"

#include <sublet.h>

#define UNIT ((size_t)2 << 20)

static char text[1 << 16];

static int has(const char *what)
{
    return strstr(text, what) != NULL;
}

static unsigned char first_byte(CUdeviceptr memory)
{
    unsigned char byte = 0;
    OK(cuMemcpyDtoH(&byte, memory, 1));
    return byte;
}

static CUdeviceptr filled(size_t bytes, unsigned char value)
{
    CUdeviceptr memory = 0;
    OK(cuMemAlloc(&memory, bytes));
    OK(cuMemsetD8(memory, value, bytes));
    return memory;
}

static CUdeviceptr unneeded;

/* Called in a pause, on a thread of the library's. */
static void say_unused(void *context, uint64_t token)
{
    const uint64_t start = unneeded, size = UNIT;
    *(int *)context += sublet_unused(token, &start, &size, 1) == SUBLET_OK;
}

int main(void)
{
    const char *weights[] = {"weights"}, *both[] = {"weights", "kv"}, *unknown[] = {"wieghts"};
    driver_start();
    int begun = sublet_region_begin_on("weights", SUBLET_CONTENTS_KEEP, 0);
    CUdeviceptr kept = filled(UNIT, 7);
    int nested = sublet_region_begin_none();
    CUdeviceptr untagged = filled(UNIT, 8);
    sublet_region_end();
    sublet_region_end();
    int everywhere = sublet_region_begin_all_threads("kv", SUBLET_CONTENTS_DISCARD, -1);
    CUdeviceptr cache = filled(UNIT, 9);
    int ended = sublet_region_end_all_threads();
    printf("regions %d %d %d, end %d\n", begun, nested, everywhere, ended);
    printf("other policy %d\n", sublet_region_begin("kv", SUBLET_CONTENTS_KEEP));

    size_t before = driver_free_bytes();
    int paused = sublet_pause_tags(NULL, weights, 1, SUBLET_WHOSE_PROCESS, 0);
    printf("paused %d, freed %zu, weights %d, kv %d, all %d\n", paused, driver_free_bytes() - before,
           sublet_tag_is_paused("weights"), sublet_tag_is_paused("kv"), sublet_is_paused());
    sublet_last_report_json(text, sizeof text);
    printf("report %d, the rest works %d\n", has("\"outcome\":\"completed\""), first_byte(untagged));
    const void *host = NULL;
    unsigned char out[4] = {0};
    int at = sublet_host_copy(kept + 100, 4, &host);
    int copied = sublet_host_copy_out(kept + 100, sizeof out, out);
    printf("saved %d %d, copied %d %d\n", at, ((const unsigned char *)host)[3], copied, out[0]);
    printf("not away %d\n", sublet_host_copy(untagged, 4, &host));
    printf("again %d\n", sublet_pause_tags(NULL, weights, 1, SUBLET_WHOSE_TENANT, 0));
    int back = sublet_resume_tags(NULL, NULL, 0, SUBLET_WHOSE_PROCESS, 0);
    printf("back %d %d\n", back, first_byte(kept));

    printf("unknown tag %d\n", sublet_pause_tags(NULL, unknown, 1, SUBLET_WHOSE_TENANT, 0));
    sublet_last_error_json(text, sizeof text);
    printf("the tags there are %d %d\n", has("\"code\":1"), has("[\"kv\",\"weights\"]"));
    printf("bad arguments %d %d %d %d\n", sublet_pause_tags(NULL, NULL, 2, 0, 0),
           sublet_pause_tags(NULL, weights, 0, 0, 0), sublet_pause_tags(NULL, weights, 1, 5, 0),
           sublet_tag_is_paused("wieghts"));

    paused = sublet_pause_tags(NULL, both, 2, SUBLET_WHOSE_TENANT, 0);
    printf("both %d, freed %zu\n", paused, driver_free_bytes() - before);
    back = sublet_resume_tenant(NULL, 0);
    printf("all tags back %d %d\n", back, first_byte(kept));

    int answers = 0;
    unneeded = filled(UNIT, 3);
    sublet_set_unused_source(say_unused, &answers);
    printf("paused %d, ", sublet_pause_tenant(NULL, 0));
    sublet_last_report_json(text, sizeof text);
    printf("answers %d\n", answers);
    back = sublet_resume_tags(NULL, weights, 1, SUBLET_WHOSE_TENANT, 0);
    printf("in stages %d, kv away %d\n", back, sublet_tag_is_paused("kv"));
    printf("contents %d %d\n", first_byte(kept), first_byte(untagged));
    sublet_set_unused_source(NULL, NULL);
    printf("too late %d\n", sublet_unused(1, NULL, NULL, 0));
    back = sublet_resume_tenant(NULL, 0);
    printf("all %d, kv away %d\n", back, sublet_tag_is_paused("kv"));

    int nowhere = sublet_set_file_dir("/nowhere"), missing = sublet_set_file_dir(NULL);
    int there = sublet_set_file_dir("/dev/shm");
    sublet_region_begin("frozen", SUBLET_CONTENTS_FILE);
    CUdeviceptr frozen = filled(UNIT, 5);
    sublet_region_end();
    const char *frozens[] = {"frozen"};
    paused = sublet_pause_tags(NULL, frozens, 1, SUBLET_WHOSE_PROCESS, 0);
    sublet_stats_json(text, sizeof text);
    printf("files in %d %d %d, paused %d, on disk %d\n", nowhere, missing, there, paused,
           has("\"file_bytes\":2097152"));
    at = sublet_host_copy(frozen, 4, &host);
    copied = sublet_host_copy_out(frozen, sizeof out, out);
    printf("in memory %d, read %d %d\n", at, copied, out[3]);
    back = sublet_resume_tenant(NULL, 0);
    printf("back from the file %d %d\n", back, first_byte(frozen));
    OK(cuMemFree(frozen));

    sublet_tenants_json(text, sizeof text);
    printf("tenants %d, ", has("tags"));
    sublet_tenant_stats_json(NULL, text, sizeof text);
    printf("stats %d, ", has("\"members\""));
    printf("swap with itself %d, ", sublet_swap_tenants(NULL, NULL, 0));
    int by_tag = sublet_swap_tags(NULL, weights, 1, NULL, frozens, 1, 0);
    int of_nobody = sublet_swap_tags(NULL, weights, 1, "nobody", NULL, 0, 0);
    printf("by tag %d, to nobody %d\n", by_tag, of_nobody);
    int prepared = sublet_prepare_tenant(NULL, 60000);
    sublet_last_report_json(text, sizeof text);
    printf("prepared %d, all %d, ", prepared, has("\"outcome\":\"completed\""));
    printf("of nobody %d\n", sublet_prepare_tenant("nobody", 0));
    OK(cuMemFree(cache));
    OK(cuMemFree(kept));
    return 0;
}
