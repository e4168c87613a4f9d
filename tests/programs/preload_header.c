/* Calls every function of sublet.h, and prints what came. */
#include "driver.h"

#include <sublet.h>

static int has_error(void)
{
    return sublet_last_error()[0] != 0;
}

int main(void)
{
    char text[16384];
    int group[3] = {-1, -1, -1};
    long long stats = sublet_stats_json(NULL, 0);
    if (strlen(sublet_version()) < 5)
        return 1;
    int has_failed = has_error();
    printf("before any memory: stats %lld, paused %d, error %d, changes %d\n", stats, sublet_is_paused(), has_failed,
           (int)sublet_changes());
    ncclGetGroupID(&group[0]);
    int set = ncclSetGroupID(7);
    ncclGetGroupID(&group[1]);
    printf("group %d %d %d, refused %d, needs a place %d\n", group[0], group[1], set, ncclSetGroupID(-1),
           ncclGetGroupID(NULL));
    int early = ncclPause(NULL) + ncclResume(NULL) + sublet_pause_tenant(NULL, 0) + sublet_resume_tenant(NULL, 0);
    sublet_last_report_json(text, sizeof text);
    int is_nothing = strcmp(text, "{\"outcome\":\"nothing\"}") == 0;
    fflush(stdout);
    int nothing = ncclMemStats();
    printf("pause before any memory %d, said %d, statistics %d\n", early, is_nothing, nothing);

    driver_start();
    int begun = sublet_region_begin("weights", SUBLET_CONTENTS_DISCARD);
    CUdeviceptr memory = 0;
    OK(cuMemAlloc(&memory, (1 << 20) + 1));
    int no_tag = sublet_region_begin(NULL, SUBLET_CONTENTS_KEEP);
    int no_contents = sublet_region_begin("weights", 9);
    int keeps_too = sublet_region_begin("weights", SUBLET_CONTENTS_KEEP);
    int ended = sublet_region_end();
    printf("region %d, wrong tag %d, wrong contents %d, other contents %d, end %d, one end too many %d\n", begun, no_tag,
           no_contents, keeps_too, ended, sublet_region_end());
    int64_t length = sublet_stats_json(text, sizeof text);
    int fits = length > 0 && strlen(text) == (size_t)length;
    int tagged = strstr(text, "\"weights\"") != NULL;
    text[0] = 'x';
    int too_short = sublet_stats_json(text, 4) == length && text[0] == 'x';
    printf("stats fit %d, too short %d, tag in them %d\n", fits, too_short, tagged);
    printf("set group too late %d\n", ncclSetGroupID(3));
    fflush(stdout);
    int printed = ncclMemStats();
    printf("statistics %d\n", printed);

    char *torch = sublet_torch_malloc(1000, 0, NULL);
    OK(cuMemsetD8((CUdeviceptr)torch, 1, 1000));
    printf("for torch %d, nothing %d, too much %d\n", torch != NULL, sublet_torch_malloc(0, 0, NULL) != NULL,
           sublet_torch_malloc((ptrdiff_t)1 << 50, 0, NULL) != NULL);
    sublet_torch_free(torch, 1000, 0, NULL);

    uint64_t before = sublet_changes();
    int paused = sublet_pause_tenant(NULL, 0);
    int is_paused = sublet_is_paused();
    int has_changed = sublet_changes() > before;
    int again = sublet_pause_tenant(NULL, 5000);
    int resumed = sublet_resume_tenant(NULL, 0);
    printf("paused %d %d %d, again %d, resumed %d %d %d, changed %d\n", paused, is_paused, has_error() && paused, again,
           resumed, sublet_is_paused(), has_error() && resumed, has_changed);
    paused = ncclPause(NULL);
    is_paused = sublet_is_paused();
    resumed = ncclResume(NULL);
    printf("together %d %d, back %d %d\n", paused, is_paused, resumed, sublet_is_paused());
    paused = sublet_command("{\"pause\": {\"timeout_ms\": 5000}}");
    is_paused = sublet_is_paused();
    resumed = sublet_command("{\"resume\": {}}");
    int wrong = sublet_command(NULL) + sublet_command("pause") + sublet_command("{\"pause\": {\"tenent\": \"nobody\"}}");
    printf("by command %d %d, back %d %d, no commands %d\n", paused, is_paused, resumed, sublet_is_paused(), wrong);
    int unknown = sublet_pause_tenant("nobody", 1000);
    printf("unknown tenant %d, error %d\n", unknown, strstr(sublet_last_error(), "nobody") != NULL);
    int begun_turns = sublet_turn_begin(30000) + sublet_turn_begin(0);
    int switched = sublet_switch_tenant(NULL, 0) + sublet_resume_in_turn(NULL, 0), nobody = sublet_switch_tenant("nobody", 0) != 0;
    int ended_turns = sublet_turn_end() + sublet_turn_end();
    /* Nobody is asked from here on, which changes nothing for who does not wait. */
    if (sublet_ask_while_waiting(NULL, NULL) != 0)
        return 1;
    printf("turns %d %d, one end too many %d, switched %d, to nobody %d\n", begun_turns, ended_turns, sublet_turn_end(),
           switched, nobody);
    int set_budget = sublet_set_budget(NULL, "0=64MiB");
    int64_t budget = sublet_budget_json(NULL, text, sizeof text);
    int shown = budget > 0 && strstr(text, "\"budgets\":\"0=64MiB\"") != NULL && strstr(text, "\"held_bytes\":2097152") != NULL;
    printf("budget %d %d, none %d %d, wrong %d, of nobody %d %d\n", set_budget, shown, sublet_set_budget(NULL, "none"),
           sublet_set_budget(NULL, NULL), sublet_set_budget(NULL, "many"), sublet_set_budget("nobody", "1GiB"),
           (int)sublet_budget_json("nobody", NULL, 0));
    printf("family %d\n", sublet_set_family("not/one"));
    int attached = sublet_attach(NULL);
    int64_t report = sublet_attach_report_json(text, sizeof text);
    int held = strstr(text, "\"launches_are_held\":true") != NULL;
    printf("attached %d, report %d, held %d\n", attached, report > 0 && strlen(text) == (size_t)report, held);
    OK(cuMemFree(memory));
    return 0;
}
