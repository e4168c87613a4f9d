//! Device memory that devices outside the driver's view hold: registrations that are seen stay in place as long as they
//! last, and what may have been registered unseen refuses a pause.

use crate::attach::{BLOCK_BYTES, Said};
use crate::stage::{Preload, Stage, given, own_file};

/// What `preload_pins.c` says to `words` under the preload object, with these variables set.
fn said(variables: &[(&str, &str)], words: &[&str]) -> Said {
    let stage = Stage::new();
    stage.library("runtime");
    let versions = format!("-Wl,--version-script={}", own_file("preload_verbs.map").display());
    stage.library_named("verbs", "libibverbs.so.1", &[&versions]);
    stage.library_named("gdrapi", "libgdrapi.so.2", &[]);
    std::fs::create_dir_all(stage.path("dev/infiniband")).expect("a directory");
    for name in ["infiniband/uverbs0", "gdrdrv", "nvidia-fs0"] {
        std::fs::write(stage.path("dev").join(name), "").expect("a file");
    }
    let program = stage.program("pins");
    let mut command = stage.command(&program, Preload::With);
    command.env("SUBLET_COMMAND", given("SUBLET_TEST_BIN")).envs(variables.iter().copied());
    Said::of(&mut command, words)
}

const STAYS_FOR: [(&str, &str); 2] =
    [("network card", "NCCL_NET_GDR_LEVEL"), ("GDRCopy", "NCCL_GDRCOPY_ENABLE")];

/// The block stays, for this reason and with this advice, at the first pause, and leaves at the second.
fn stays_while_registered(said: &Said, (reason, advice): (&str, &str)) {
    let text = said.lines.join("\n");
    let ends = ["\npause 768\n", "\npause 0\n"].map(|end| text.matches(end).count());
    assert_eq!(ends, [1, 1], "exit code 3 for what stays, then 0: {text}");
    let [(why, bytes)] = &said.stays(0)[..] else {
        panic!("{:?}", said.stays(0));
    };
    assert!(why.contains(reason) && why.contains(advice), "{why}");
    assert_eq!(*bytes, BLOCK_BYTES);
    assert_eq!(said.stays(1), [], "{text}");
}

#[test]
fn a_region_of_a_network_card_stays_while_it_is_registered() {
    for symbol in ["ibv_reg_mr@IBVERBS_1.1", "ibv_reg_mr_iova2@IBVERBS_1.8", "ibv_reg_mr"] {
        let reg = format!("reg={symbol}");
        let words =
            ["malloc", "device=infiniband/uverbs0", "verbs", &reg, "pause", "stats", "resume"];
        let more = ["bad-dereg", "dereg", "pause", "stats", "resume"];
        let said = said(&[], &[&words[..], &more].concat());
        assert!(said.lines.contains(&"registered 1".to_owned()), "{:?}", said.lines);
        assert!(said.lines.contains(&"deregistered 22".to_owned()), "{:?}", said.lines);
        stays_while_registered(&said, STAYS_FOR[0]);
    }
}

#[test]
fn a_region_that_failed_to_end_stays_on() {
    let words = ["malloc", "verbs", "reg=ibv_reg_mr@IBVERBS_1.1", "bad-dereg", "pause", "stats"];
    let said = said(&[], &words);
    assert_eq!(said.stays(0).len(), 1, "{:?}", said.lines);
}

#[test]
fn what_was_not_registered_leaves() {
    let words = [
        "malloc",
        "device=infiniband/uverbs0",
        "verbs",
        "bad-reg=ibv_reg_mr@IBVERBS_1.1",
        "host-reg=ibv_reg_mr@IBVERBS_1.1",
        "reg=no_such_function@IBVERBS_1.1",
        "reg=ibv_reg_mr@IBVERBS_9.9",
        "pause",
        "stats",
        "host-reg=ibv_reg_mr@IBVERBS_1.1",
        "resume",
    ];
    let said = said(&[], &words);
    let registered = said.lines.iter().filter(|line| line.starts_with("registered"));
    let registered: Vec<_> = registered.map(String::as_str).collect();
    let wanted = [
        "registered 0",
        "registered 1",
        "registered 0",
        "registered 0",
        // Host memory, while the tenant is paused.
        "registered 1",
    ];
    assert_eq!(registered, wanted);
    assert_eq!(said.stays(0), []);
    assert_eq!(said.lines.last().map(String::as_str), Some("resume 0"));
}

#[test]
fn what_gdrcopy_has_pinned_stays_until_it_is_unpinned_or_closed() {
    for end in ["unpin", "close"] {
        let words = ["malloc", "device=gdrdrv", "gdrapi", "pin", "pause", "stats", "resume"];
        let said = said(&[], &[&words[..], &[end, "pause", "stats", "resume"]].concat());
        assert!(said.lines.contains(&"pinned 0".to_owned()), "{:?}", said.lines);
        stays_while_registered(&said, STAYS_FOR[1]);
    }
}

#[test]
fn pins_that_nobody_sees_are_refused_by_device_file_with_the_way_out() {
    let rows = [
        ("infiniband/uverbs0", "libibverbs.so is not loaded", "uverbs"),
        ("gdrdrv", "libgdrapi.so is not loaded", "gdrdrv"),
        ("nvidia-fs0", "cuFile's registrations are not seen", "nvidia-fs"),
    ];
    for (file, why, name) in rows {
        let device = format!("device={file}");
        let words = ["malloc", &device, "pause", "stats"];
        let refused = said(&[], &words);
        let text = refused.lines.join("\n");
        for word in [
            &format!("dev/{file} open"),
            why,
            &format!("SUBLET_WITHOUT_PINS={name}"),
            "The tenant is active as before",
            "\npause 256",
        ] {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
        // The user says that it pins nothing.
        let told = said(&[("SUBLET_WITHOUT_PINS", name)], &words);
        assert_eq!(told.lines.last().map(String::as_str), Some("pause 0"), "{:?}", told.lines);
        assert_eq!(told.stays(0), []);
    }
}

#[test]
fn a_clock_on_the_device_that_a_hold_outlasts_is_noted() {
    for (value, is_noted) in [("5000", true), ("100000", false)] {
        let said = said(&[("NCCL_EP_TIMEOUT_MS", value)], &["malloc", "stats"]);
        let notes = said.json[0]["notes"].to_string();
        let wanted = ["NCCL_EP_TIMEOUT_MS=5000", "70000 ms", "pause between steps"];
        assert!(!is_noted || wanted.iter().all(|word| notes.contains(word)), "{value}: {notes}");
        assert!(is_noted || notes == "[]", "{value}: {notes}");
    }
}

#[test]
fn an_open_card_is_no_reason_where_no_memory_would_leave() {
    let words =
        ["device=infiniband/uverbs0", "malloc", "verbs", "reg=ibv_reg_mr", "device=nvidia-fs0"];
    let said = said(&[], &[&words[..], &["pause", "stats"]].concat());
    assert_eq!(said.lines.last().map(String::as_str), Some("pause 768"), "{:?}", said.lines);
    assert_eq!(said.stays(0).len(), 1);
}
