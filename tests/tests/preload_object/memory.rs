//! Plain memory under the preload object behaves as the driver's own, whatever is called when.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use sublet_tests::until;

use crate::stage::{Preload, Stage, transcript};

/// What `preload_<program>.c` prints to `words`, which is the same with and without us.
fn said(program: &str, words: &[&str]) -> Vec<String> {
    let stage = Stage::new();
    let program = stage.program(program);
    let text = stage.same(&program, words);
    text.lines().map(str::to_owned).collect()
}

#[test]
fn questions_about_any_memory_are_answered_while_the_process_is_paused() {
    assert_eq!(
        said("paused", &["questions"]),
        [
            "plain memory: by IPC 1, kinds of handles 0",
            "host: type 1, code 0, as before",
            "plain: type 2, code 0, as before",
            "small: type 2, code 0, as before",
            "mapped: type 2, code 0, as before",
            "of a stream: type 2, code 0, as before",
        ]
    );
}

#[test]
fn sizes_and_counts_that_nothing_has_are_refused() {
    assert_eq!(said("stays", &["wide"]), ["pitched 1"]);
    let stage = Stage::new();
    let program = stage.program("stays");
    let output = stage.command(&program, Preload::With).arg("rights").output();
    assert_eq!(transcript(&output.expect("it starts")), "rights 1\n");
}

#[test]
fn memory_that_never_left_is_used_and_freed_while_the_process_is_paused() {
    assert_eq!(
        said("paused", &["teardown"]),
        ["copied 1010101 1010101 7, 1010101 7", "free again: 1"]
    );
}

#[test]
fn a_fill_of_memory_that_is_away_waits_for_the_resume() {
    assert_eq!(said("paused", &["touch"]), ["filled with 9, when it was there"]);
}

#[test]
fn a_free_beside_a_capture_waits_for_the_work_and_leaves_the_capture_alone() {
    assert_eq!(
        said("captures", &["meanwhile"]),
        [
            "meanwhile: free CUDA_SUCCESS, after the work, stream CUDA_SUCCESS",
            "meanwhile: capture CUDA_SUCCESS, sum 10485760",
        ]
    );
}

#[test]
fn a_free_in_the_order_of_a_stream_waits_for_nothing_and_comes_after_its_work() {
    assert_eq!(
        said("late_frees", &["order"]),
        [
            "order: freed CUDA_SUCCESS, and the work goes on: 1",
            "order: stream CUDA_SUCCESS, 0 bytes less are free",
        ]
    );
}

#[test]
fn what_a_stream_is_to_free_is_freed_once() {
    let stage = Stage::new();
    let mut command = stage.command(stage.program("late_frees"), Preload::With);
    let text = transcript(&command.arg("twice").output().expect("it starts"));
    let refused = "twice: CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE\n";
    assert_eq!(text, format!("{refused}twice: stream CUDA_SUCCESS, 0 bytes less are free\n"));
}

#[test]
fn what_the_driver_refuses_to_free_behind_a_stream_is_offered_again() {
    let stage = Stage::new();
    let mut command = stage.command(stage.program("late_frees"), Preload::With);
    let command = command.arg("order").env("SIMCUDA_FAULTS", "cuMemUnmap:1:1");
    let text = transcript(&command.output().expect("it starts"));
    let freed = "order: freed CUDA_SUCCESS, and the work goes on: 1\n";
    assert_eq!(text, format!("{freed}order: stream CUDA_SUCCESS, 0 bytes less are free\n"));
}

#[test]
fn a_thread_in_the_midst_of_a_call_waits_for_no_free_behind_a_stream() {
    let stage = Stage::new();
    let mut command = stage.command(stage.program("late_frees"), Preload::With);
    command.env("SIMCUDA_FAULTS", "cuMemUnmap:1:1").env("CUDA_LOG_FILE", stage.path("refused"));
    let text = transcript(&command.arg("inside").output().expect("it starts"));
    assert_eq!(text, "inside: 8388608 bytes less are free, and behind it 0\n");
}

/// Another process looks: the program's own question for free memory would have it offered.
#[test]
fn what_the_driver_refuses_to_free_behind_a_stream_is_offered_with_the_next() {
    let stage = Stage::new();
    let mut command = stage.command(stage.program("late_frees"), Preload::With);
    command.env("SIMCUDA_FAULTS", "cuMemUnmap:1:1").env("CUDA_LOG_FILE", stage.path("refused"));
    let command = command.arg("next").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut line = String::new();
    let mut said = BufReader::new(child.stdout.take().expect("its output"));
    said.read_line(&mut line).expect("a line");
    let before: u64 = line.trim().parse().expect(&line);
    let are_gone = || Ok(stage.free_bytes()[0] == before);
    until("the end of all blocks", Duration::from_mins(1), are_gone).expect("all go");
    drop(child.stdin.take());
    assert!(child.wait().expect("its end").success());
}

#[test]
fn a_block_that_ends_with_its_context_and_behind_a_stream_ends_once() {
    let stage = Stage::new();
    let mut command = stage.command(stage.program("contexts"), Preload::With);
    let command = command.arg("late").env("SIMCUDA_LATENCY", "cuMemUnmap:300000");
    let text = transcript(&command.output().expect("it starts"));
    let sum = format!("late: sum {}\n", 4 * (16_u64 << 20));
    assert_eq!(text, format!("late: a later block has its address\n{sum}{sum}"));
}

#[test]
fn a_pool_of_another_device_is_counted_against_that_devices_budget() {
    let stage = Stage::new();
    let program = stage.program("pools");
    let said = |budget: &str| {
        let mut command = stage.command(&program, Preload::With);
        transcript(&command.env("SUBLET_BUDGET", budget).output().expect("it starts"))
    };
    let (fits, full) = ("CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY");
    let text = |pool: &str, stream: &str, plain: &str| {
        format!("of the pool: {pool}\nof the stream: {stream}\nplain: {plain}\n")
    };
    assert_eq!(said("0=400MiB,1=16MiB"), text(full, full, fits), "the pool's device is small");
    assert_eq!(said("0=16MiB,1=400MiB"), text(fits, fits, fits), "the current one is");
    assert_eq!(said("0=16MiB,1=136MiB"), text(fits, fits, full), "both are counted");
}

#[test]
fn captures_begin_while_another_thread_frees() {
    assert_eq!(said("captures", &["meets"]), ["meets: 1000 captures"]);
}

#[test]
fn a_thread_that_captures_frees_in_relaxed_mode() {
    assert_eq!(
        said("captures", &["relaxed"]),
        [
            "relaxed thread: free CUDA_SUCCESS",
            "relaxed thread: capture CUDA_SUCCESS, sum 10485760",
            "relaxed capture: free CUDA_SUCCESS",
            "relaxed capture: capture CUDA_SUCCESS, sum 10485760",
        ]
    );
}

#[test]
fn a_free_that_the_driver_refuses_in_a_capture_is_refused() {
    assert_eq!(
        said("captures", &["global"]),
        [
            "global: free CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            "global: capture CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            "global: free afterwards CUDA_SUCCESS",
        ]
    );
}

#[test]
fn a_free_of_plain_memory_in_the_order_of_a_captured_stream_is_refused() {
    assert_eq!(
        said("captures", &["ordered"]),
        [
            "ordered: free CUDA_ERROR_INVALID_VALUE",
            "ordered: capture CUDA_SUCCESS, sum 10485760",
            "ordered: sum 6291456",
            "ordered: free afterwards CUDA_SUCCESS",
        ]
    );
}

#[test]
fn a_capture_that_another_thread_may_not_end_goes_on() {
    assert_eq!(
        said("captures", &["thread"]),
        [
            "thread: end elsewhere 908",
            "thread: free CUDA_SUCCESS",
            "thread: capture CUDA_SUCCESS, sum 10485760",
        ]
    );
}

/// The driver has no room for the first block that is to be freed for its wait.
#[test]
fn a_free_beside_a_capture_leaves_it_alone_where_memory_is_short() {
    let stage = Stage::new();
    let mut command = stage.command(stage.program("captures"), Preload::With);
    let command = command.arg("thread").env("SIMCUDA_FAULTS", "cuMemAlloc:2:2");
    let text = transcript(&command.output().expect("it starts"));
    let ends = "thread: free CUDA_SUCCESS\nthread: capture CUDA_SUCCESS, sum 10485760\n";
    assert_eq!(text, format!("thread: end elsewhere 908\n{ends}"));
}

#[test]
fn a_capture_from_before_the_process_joined_refuses_a_pause_and_goes_on() {
    assert_eq!(said("captures", &["early"]), ["early: capture CUDA_SUCCESS"]);
}

#[test]
fn a_capture_of_a_blocking_stream_from_before_an_attach_refuses_a_pause_and_goes_on() {
    let stage = Stage::new();
    let program = stage.program("captures");
    let text = stage.same_as_without(Preload::Attached, &program, &["older"]);
    assert_eq!(text, "older: capture CUDA_SUCCESS\n");
}

#[test]
fn a_capture_ends_with_its_stream_by_whatever_name_that_is_destroyed() {
    assert_eq!(said("captures", &["dropped"]), ["dropped: free CUDA_SUCCESS"]);
}

/// What is left of memory after `what`, which ends a context, but for one block of another context.
fn lines_of_an_end(what: &str) -> Vec<String> {
    let rest = [
        "67108864 bytes less are free",
        "free of 0: CUDA_ERROR_INVALID_VALUE",
        "free of 1: CUDA_ERROR_INVALID_VALUE",
        "sum 117440512",
        "0 bytes less are free",
    ];
    rest.iter().map(|line| format!("{what}: {line}")).collect()
}

#[test]
fn plain_memory_ends_with_its_context() {
    assert_eq!(said("contexts", &["destroy"]), lines_of_an_end("destroy"));
}

#[test]
fn plain_memory_ends_with_a_context_of_the_names_of_cuda_2() {
    assert_eq!(said("contexts", &["plain"]), lines_of_an_end("plain"));
}

#[test]
fn a_program_with_a_context_of_its_own_alone_is_paused_in_that() {
    let stage = Stage::new();
    let program = stage.program("contexts");
    let said = |preload| {
        let mut command = stage.command(&program, preload);
        command.env("SIMCUDA_CONTEXT_BYTES", "104857600").arg("alone");
        transcript(&command.output().expect("it starts"))
    };
    let text = "alone: primary context 0, 0, 0, word 7, 0 bytes less are free\n";
    assert_eq!([Preload::Without, Preload::With].map(said), [text; 2]);
}

#[test]
fn work_in_a_context_from_before_an_attach_is_waited_for() {
    let stage = Stage::new();
    let program = stage.program("contexts");
    let text = stage.same_as_without(Preload::Attached, &program, &["work"]);
    assert_eq!(text, "work: sum 7340032\n");
}

#[test]
fn work_in_a_context_of_the_names_of_cuda_2_is_waited_for() {
    assert_eq!(said("contexts", &["plain-work"]), ["plain-work: sum 7340032"]);
}

#[test]
fn work_in_a_context_that_outlives_an_attempt_to_end_it_is_waited_for() {
    assert_eq!(said("contexts", &["held"]), ["held: sum 7340032"]);
    let stage = Stage::new();
    let program = stage.program("contexts");
    let said = |preload| {
        let mut command = stage.command(&program, preload);
        command.env("SIMCUDA_FAULTS", "cuCtxDestroy:1:1").arg("refused");
        transcript(&command.output().expect("it starts"))
    };
    let text = "refused: CUDA_ERROR_INVALID_VALUE\nrefused: sum 7340032\n";
    assert_eq!([Preload::Without, Preload::With].map(said), [text; 2]);
}

#[test]
fn a_free_waits_for_the_work_of_every_context_that_may_use_the_memory() {
    for what in ["owner", "others"] {
        let line = format!("{what}: free CUDA_SUCCESS, after the work, stream CUDA_SUCCESS");
        assert_eq!(said("contexts", &[what]), [line]);
    }
}

#[test]
fn a_capture_that_ends_with_its_context_refuses_no_pause() {
    assert_eq!(said("contexts", &["captured"]), ["captured: sum 117440512"]);
}

/// A pause that cannot ask the device what is unchanged says so, and copies everything.
#[test]
fn each_context_is_asked_what_is_unchanged_by_what_was_loaded_in_it() {
    for what in ["again", "release", "reset"] {
        let stage = Stage::new();
        let mut command = stage.command(stage.program("contexts"), Preload::With);
        let output = command.arg(what).output().expect("it starts");
        transcript(&output);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{what}");
    }
}

#[test]
fn memory_of_a_context_that_outlives_a_reset_of_the_primary_one_is_paused_in_that() {
    assert_eq!(said("contexts", &["survivor"]), ["survivor: word 7070707"]);
}

#[test]
fn a_thread_that_is_cancelled_while_its_call_waits_ends_and_not_its_process() {
    assert_eq!(said("cancel", &["deferred"]), ["cancelled"]);
    assert_eq!(said("cancel", &["asynchronous"]), ["cancelled"]);
    assert_eq!(said("cancel", &["memory"]), ["cancelled"]);
    assert_eq!(said("cancel", &["graph"]), ["cancelled"]);
}

#[test]
fn plain_memory_ends_with_the_last_reference_to_its_context() {
    let attached = "attached: 136314880 bytes less are free".to_owned();
    let lines: Vec<_> = std::iter::once(attached).chain(lines_of_an_end("detach")).collect();
    assert_eq!(said("contexts", &["detach"]), lines);
}

#[test]
fn plain_memory_ends_with_its_context_while_the_process_is_paused() {
    assert_eq!(said("contexts", &["paused"]), lines_of_an_end("paused"));
}

#[test]
fn plain_memory_ends_with_the_primary_context() {
    for what in ["release", "reset"] {
        let lines = [
            "69206016 bytes less are free while it is retained",
            "0 bytes less are free",
            "free of 0: CUDA_ERROR_INVALID_VALUE",
            "free of 1: CUDA_ERROR_INVALID_VALUE",
            "afterwards 5",
        ];
        let lines = lines.map(|line| format!("{what}: {line}"));
        assert_eq!(said("contexts", &[what]), lines);
    }
}

#[test]
fn contexts_that_come_and_go_do_not_fail_a_pause() {
    assert_eq!(said("contexts", &["storm"]), ["storm: 0 bytes less are free"]);
}

#[test]
fn threads_that_use_all_kinds_of_memory_at_once_are_paused_at_any_instant() {
    let fresh = std::process::id().to_string();
    for seed in ["1", &fresh] {
        assert_eq!(
            said("churn", &[seed, "6", "20"]),
            ["churn: 0 bytes less are free"],
            "seed {seed}"
        );
    }
}

#[test]
fn processes_that_hand_memory_to_each_other_all_the_time_are_paused_at_any_instant() {
    let fresh = std::process::id().to_string();
    for seed in ["1", &fresh] {
        let said = said("share", &[seed, "3", "15"]);
        let ends = ["share: the other ended with 0, and 0 bytes are in use"];
        assert_eq!(said, ends, "seed {seed}");
    }
}

#[test]
fn peer_access_of_before_an_attach_reaches_what_is_asked_for_afterwards() {
    let stage = Stage::new();
    let program = stage.program("peers");
    for preload in [Preload::With, Preload::Attached] {
        let text = stage.same_as_without(preload, &program, &["late"]);
        assert_eq!(text, "late: CUDA_SUCCESS, word 6\n", "{preload:?}");
        let text = stage.same_as_without(preload, &program, &["never"]);
        let lines = ["CUDA_SUCCESS", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"];
        assert_eq!(text, lines.map(|line| format!("never: {line}\n")).concat(), "{preload:?}");
    }
}

#[test]
fn opened_memory_is_in_reach_of_devices_with_peer_access() {
    assert_eq!(said("peers", &["opened"]), ["opened: CUDA_SUCCESS, word 8"]);
    assert_eq!(said("peers", &["opening"]), ["opening: CUDA_SUCCESS, word 8"]);
}

/// Each driver call of an allocation takes long enough for access to come in its midst.
#[test]
fn blocks_that_come_and_go_while_peer_access_is_enabled_are_in_reach_behind_it() {
    let stage = Stage::new();
    let program = stage.program("peers");
    for call in ["cuMemSetAccess", "cuMemUnmap", "cuMemMap"] {
        let mut command = stage.command(&program, Preload::With);
        let command = command.arg("meanwhile").env("SIMCUDA_LATENCY", format!("{call}:20000"));
        let text = transcript(&command.output().expect("it starts"));
        assert_eq!(text, "meanwhile: CUDA_SUCCESS, word 9\n", "{call}");
    }
}

#[test]
fn memory_is_opened_by_the_form_of_the_call_before_cuda_11() {
    assert_eq!(said("peers", &["opened-old"]), ["opened: CUDA_SUCCESS, word 8"]);
}

/// What `preload_stays.c` is told of itself while it is paused, and at its end, and its other lines.
fn said_of_itself(word: &str) -> (Vec<Value>, Vec<String>) {
    let stage = Stage::new();
    let program = stage.program("stays");
    let output = stage.command(&program, Preload::With).arg(word).output();
    let text = transcript(&output.expect("it starts"));
    let (json, lines): (Vec<&str>, Vec<&str>) =
        text.lines().partition(|line| line.starts_with('{'));
    let json = json.into_iter().map(|line| serde_json::from_str(line).expect(line)).collect();
    (json, lines.into_iter().map(str::to_owned).collect())
}

#[test]
fn a_process_whose_memory_all_stays_joins_its_tenant_and_its_memory_is_counted() {
    let kinds = [
        ("async", "stream-ordered"),
        ("pool", "stream-ordered"),
        ("managed", "managed"),
        ("pitched", "pitched"),
        ("array", "arrays"),
    ];
    for (word, reason) in kinds {
        let (stats, lines) = said_of_itself(word);
        assert!(lines.is_empty(), "{word}: {lines:?}");
        let pinned = &stats[0]["pool"]["devices"][0]["pinned"][0];
        assert_eq!(pinned["bytes"], 8 << 20, "{word}: {}", stats[0]);
        assert_eq!(pinned["count"], 1, "{word}");
        let text = pinned["reason"].as_str().expect("a reason");
        assert!(text.contains(reason), "{word}: {text}");
        let devices = stats[1]["pool"]["devices"].as_array().expect("devices");
        assert!(devices.is_empty(), "{word}: counted after its end: {}", stats[1]);
    }
}

#[test]
fn managed_memory_is_moved_to_a_device_after_the_resume() {
    let (_, lines) = said_of_itself("prefetch");
    assert_eq!(lines, ["moved after the resume"]);
}

#[test]
fn copies_between_devices_are_right_where_these_do_not_reach_each_other() {
    let stage = Stage::new();
    let program = stage.program("across");
    let said = |preload, no_p2p: &str| {
        let mut command = stage.command(&program, preload);
        transcript(&command.env("SIMCUDA_NO_P2P", no_p2p).output().expect("it starts"))
    };
    let expected = said(Preload::Without, "0");
    assert_eq!(expected.lines().count(), 2 * (8 + 4 + 2) + 2, "{expected}");
    assert!(!expected.contains("ERROR"), "{expected}");
    assert_eq!(said(Preload::Without, "1"), expected, "the driver's own memory");
    assert_eq!(said(Preload::With, "0"), expected);
    assert_eq!(said(Preload::With, "1"), expected);
}

#[test]
fn a_library_is_told_of_its_small_allocations_and_uses_them_as_without_slabs() {
    let stage = Stage::new();
    let library = stage.library_named("slabs", "libnccl.so.9", &[]);
    let rpath = format!("-Wl,-rpath,{}", library.parent().expect("a folder").display());
    let flags = ["-DMAIN", "-Wl,--no-as-needed", library.to_str().expect("UTF-8"), rpath.as_str()];
    let program = stage.program_as("slabs", &flags);
    let text = stage.same(&program, &[]);
    assert!(text.contains("71 72 73 74 74, windows 77 77 78"), "{text}");
    assert!(text.ends_with("nothing is there: 1\n"), "{text}");
}

/// NCCL's order makes files, which a deep pause can take; any other leaves the memory the driver's.
#[test]
fn shared_host_memory_is_right_in_any_order_of_calls() {
    let stage = Stage::new();
    let program = stage.program_named("host_orders", "libnccl.so.orders");
    stage.same(&program, &[]);
    let output = stage.command(&program, Preload::With).arg("files").output();
    let text = transcript(&output.expect("it starts"));
    let counts: Vec<_> = text.lines().filter(|line| !line.starts_with("memory type")).collect();
    assert_eq!(
        counts,
        [
            "create, reserve, map: 1",
            "reserve, create, map: 0",
            "create twice, reserve twice, map crosswise: 0",
            "another thread reserves: 0",
            "two in one reservation: 0",
            "behind a hole: 0",
            "imported where it was made: 2",
            "imported before it is mapped: 0",
            "released, then device memory: 0",
            "device memory in between: 0",
            "never mapped: 0",
            "during a capture: 1",
            "aligned: 1",
            "files as large are not allowed: 0",
            "few descriptors are left: 0",
            "without these limits: 1",
            "in the end: 0",
        ]
    );
}
