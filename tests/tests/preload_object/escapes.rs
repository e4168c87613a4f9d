//! Libraries that the loader binds past a preloaded object: they are reached, or a pause is refused by their names.

use crate::attach::{BLOCK_BYTES, Said, row};
use crate::stage::{Preload, Stage, simcuda_dir};

/// What `preload_attach.c` says under the preload object, with a runtime built with `flags`.
fn said(flags: &[&str], words: &[&str]) -> Said {
    let stage = Stage::new();
    let driver = simcuda_dir().join("libcuda.so.1");
    stage.library_as("runtime", flags);
    stage.library_as("direct", &[driver.to_str().expect("UTF-8")]);
    let program = stage.program("attach");
    Said::by(&stage, Preload::With, &program, words)
}

#[test]
fn a_library_with_an_order_of_its_own_is_reached() {
    let words = ["deep", "malloc", "stats", "pause", "resume", "report", "outside"];
    let said = said(&[], &words);
    assert_eq!(said.own_bytes(0), BLOCK_BYTES, "its memory is ours: {:?}", said.lines);
    assert_eq!(said.lines[..3], ["malloc 0", "pause 0", "resume 0, wrong words 0"]);
    let runtime = row(&said.json[1], "libruntime.so");
    assert_eq!((&runtime["state"], &runtime["slots"]), (&"hooked".into(), &1.into()), "{runtime}");
    assert_eq!(runtime["why"], "its CUDA runtime gives our functions out");
    assert_eq!(said.lines.last().map(String::as_str), Some("outside 0"), "{:?}", said.lines);
}

#[test]
fn a_library_with_an_order_of_its_own_that_links_the_driver_is_reached() {
    let words =
        ["deep-direct", "malloc-direct", "malloc-table", "stats", "pause", "resume", "report"];
    let said = said(&[], &words);
    assert_eq!(said.own_bytes(0), 2 * BLOCK_BYTES, "{:?}", said.lines);
    let direct = row(&said.json[1], "libdirect.so");
    assert!(direct["why"].as_str().expect("text").contains("RTLD_DEEPBIND"), "{direct}");
    let wanted =
        ["direct 0", "malloc-direct 0", "malloc-table 0", "pause 0", "resume 0, wrong words 0"];
    assert_eq!(said.lines, wanted);
}

#[test]
fn what_its_initialiser_took_from_the_driver_is_exchanged() {
    let said = said(&["-DEARLY"], &["deep", "malloc", "stats", "report"]);
    assert_eq!(said.own_bytes(0), BLOCK_BYTES, "{:?}", said.lines);
    let runtime = row(&said.json[1], "libruntime.so");
    assert!(runtime["exchanged"].as_u64().expect("a number") >= 4, "{runtime}");
}

#[test]
fn a_library_that_ran_past_us_is_refused_by_name() {
    let words = ["direct", "malloc-direct", "deep-alone", "outside", "pause", "resume"];
    let said = said(&["-DEARLY", "-DON_THE_HEAP"], &words);
    let text = said.lines.join("\n");
    let refused = text.find("cannot be paused from outside: launches from").expect(&text);
    for word in ["libruntime.so may pass Sublet by", "RTLD_DEEPBIND", "sublet_pause_tenant"] {
        assert!(text[refused..].contains(word), "{word}: {text}");
    }
    assert!(text.contains("The tenant is active as before"), "{text}");
    assert!(text.contains("\npause 0\nresume 0"), "from inside it can be paused: {text}");
}

#[test]
fn a_driver_in_a_namespace_of_its_own_is_refused_by_name() {
    let words = ["direct", "malloc-direct", "namespace", "outside", "pause", "resume"];
    let said = said(&[], &words);
    let text = said.lines.join("\n");
    assert!(text.contains("\napart 0\n"), "{text}");
    let refused = text.find("cannot be paused from outside: ").expect(&text);
    for word in ["libcuda.so.1 is loaded in a namespace of its own (dlmopen)", "with dlopen"] {
        assert!(text[refused..].contains(word), "{word}: {text}");
    }
    assert!(text.contains("\npause 0\nresume 0"), "from inside it can be paused: {text}");
}

#[test]
fn a_forked_child_that_joins_is_looked_at_when_it_is_paused() {
    let words = ["close=libdirect.so", "into-child", "runtime", "malloc", "outside", "resume"];
    let said_well = said(&[], &words);
    let text = said_well.lines.join("\n");
    assert!(text.contains("\noutside 0\nresume 0, wrong words 0"), "{text}");
    let words =
        ["close=libdirect.so", "into-child", "direct", "malloc-direct", "deep-alone", "outside"];
    let text = said(&["-DEARLY", "-DON_THE_HEAP"], &words).lines.join("\n");
    assert!(text.contains("libruntime.so may pass Sublet by"), "{text}");
}
