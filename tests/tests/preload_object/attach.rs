//! `sublet_attach`: the same for a process that was started without us.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::stage::{CAPACITY_BYTES, Preload, Stage, given, preload_path, simcuda_dir, transcript};

pub(crate) const BLOCK_BYTES: u64 = 8 << 20;

/// What `preload_attach.c` says to `words`: its lines, and the JSON among them.
pub(crate) struct Said {
    pub(crate) lines: Vec<String>,
    pub(crate) json: Vec<Value>,
}

impl Said {
    pub(crate) fn by(stage: &Stage, preload: Preload, program: &Path, words: &[&str]) -> Self {
        let mut command = stage.command(program, preload);
        command
            .env("SUBLET_ATTACH", preload_path())
            .env("SUBLET_COMMAND", given("SUBLET_TEST_BIN"));
        Self::of(&mut command, words)
    }

    /// What the program of `command` says to `words`.
    pub(crate) fn of(command: &mut Command, words: &[&str]) -> Self {
        let text = transcript(&command.args(words).output().expect("it starts"));
        let (json, lines): (Vec<&str>, Vec<&str>) =
            text.lines().partition(|line| line.starts_with('{'));
        Self {
            lines: lines.into_iter().map(str::to_owned).collect(),
            json: json.into_iter().map(|line| serde_json::from_str(line).expect(line)).collect(),
        }
    }

    /// What has to stay, by reason.
    pub(crate) fn stays(&self, stats: usize) -> Vec<(String, u64)> {
        let devices = self.json[stats]["pool"]["devices"].as_array().expect("devices");
        let rows = devices.iter().flat_map(|device| device["pinned"].as_array().expect("list"));
        rows.map(|row| {
            let reason = row["reason"].as_str().expect("text").to_owned();
            (reason, row["bytes"].as_u64().expect("bytes"))
        })
        .collect()
    }

    pub(crate) fn own_bytes(&self, stats: usize) -> u64 {
        let devices = self.json[stats]["pool"]["devices"].as_array().expect("devices");
        let classes = devices.iter().flat_map(|device| device["memory"].as_array().expect("list"));
        classes.map(|class| class["own_bytes"].as_u64().expect("bytes")).sum()
    }
}

/// The row of a report about the file `name`.
pub(crate) fn row<'a>(report: &'a Value, name: &str) -> &'a Value {
    let rows = report["libraries"].as_array().expect("a list");
    let ends = |row: &&Value| row["path"].as_str().expect("a path").ends_with(name);
    rows.iter().find(ends).unwrap_or_else(|| panic!("{name} is not in {report}"))
}

/// A stage with the stand-in for the CUDA runtime.
fn stage() -> Stage {
    let stage = Stage::new();
    stage.library("runtime");
    stage
}

#[test]
fn memory_of_a_runtime_that_starts_after_the_attach_is_pausable() {
    let stage = stage();
    let program = stage.program("attach");
    let words = ["attach", "runtime", "malloc", "malloc", "stats", "pause", "resume", "report"];
    let said = Said::by(&stage, Preload::Without, &program, &words);
    assert_eq!(
        said.lines,
        ["attach 0", "malloc 0", "malloc 0", "pause 0", "resume 0, wrong words 0"]
    );
    assert_eq!(said.own_bytes(0), 2 * BLOCK_BYTES);
    let report = &said.json[1];
    let runtime = row(report, "libruntime.so");
    assert_eq!((&runtime["slots"], &runtime["exchanged"]), (&1.into(), &0.into()), "{report}");
    assert_eq!(runtime["why"], "its CUDA runtime gives our functions out");
    assert_eq!(row(report, "/attach")["state"], "hooked");
    assert_eq!(report["tenant"], "preload-test");
    assert_eq!(report["launches_are_held"], true);
    assert!(report["devices"].as_array().expect("a list").is_empty(), "{report}");
    assert_eq!(stage.free_bytes(), [CAPACITY_BYTES; 2]);
}

#[test]
fn a_runtime_that_has_started_is_exchanged_and_its_earlier_memory_named() {
    let stage = stage();
    let program = stage.program("attach");
    let words =
        ["runtime", "malloc", "attach", "report", "malloc", "stats", "pause", "resume", "malloc"];
    let said = Said::by(&stage, Preload::Without, &program, &words);
    assert_eq!(
        said.lines,
        ["malloc 0", "attach 0", "malloc 0", "pause 0", "resume 0, wrong words 0", "malloc 0"]
    );
    let report = &said.json[0];
    let runtime = row(report, "libruntime.so");
    assert_eq!(runtime["state"], "hooked", "{report}");
    assert!(runtime["exchanged"].as_u64().expect("a number") >= 4, "{report}");
    assert_eq!(report["devices"][0]["device"], 0);
    assert_eq!(report["devices"][0]["used_bytes"], BLOCK_BYTES);
    assert_eq!(said.own_bytes(1), BLOCK_BYTES, "only what came after the attach");
    let notes = said.json[1]["notes"].as_array().expect("notes");
    assert!(notes.iter().any(|note| note.as_str().expect("text").contains("GPU 0")), "{notes:?}");
}

#[test]
fn a_library_that_uses_the_driver_while_it_is_loaded_is_exchanged() {
    let stage = Stage::new();
    stage.library_as("runtime", &["-DEARLY"]);
    let program = stage.program("attach");
    let words = ["attach", "runtime", "malloc", "stats", "report", "pause", "resume"];
    let said = Said::by(&stage, Preload::Without, &program, &words);
    assert_eq!(said.own_bytes(0), BLOCK_BYTES);
    let row = row(&said.json[1], "libruntime.so");
    assert!(row["exchanged"].as_u64().expect("a number") >= 4, "{row}");
}

#[test]
fn a_runtime_that_keeps_its_table_elsewhere_is_late_and_named() {
    let stage = Stage::new();
    stage.library_as("runtime", &["-DON_THE_HEAP"]);
    let program = stage.program("attach");
    let words = ["runtime", "malloc", "attach", "malloc", "report"];
    let said = Said::by(&stage, Preload::Without, &program, &words);
    assert_eq!(said.lines, ["malloc 0", "attach 0", "malloc 0"]);
    let report = &said.json[0];
    let runtime = row(report, "libruntime.so");
    assert_eq!(runtime["state"], "late", "{report}");
    assert!(runtime["why"].as_str().expect("text").contains("the driver's own"), "{report}");
    assert_eq!(report["launches_are_held"], false);
}

#[test]
fn a_process_with_a_late_library_is_paused_from_inside_only() {
    let stage = Stage::new();
    let driver = simcuda_dir().join("libcuda.so.1");
    stage.library_as("runtime", &["-DON_THE_HEAP"]);
    stage.library_as("direct", &[driver.to_str().expect("UTF-8")]);
    let program = stage.program("attach");
    let words = ["runtime", "malloc", "attach", "direct", "malloc-direct", "outside", "pause"];
    let more = ["outside", "resume", "stats"];
    let said = Said::by(&stage, Preload::Without, &program, &[&words[..], &more].concat());
    let text = said.lines.join("\n");
    let refused = text.find("cannot be paused from outside: launches from").expect(&text);
    assert!(text[refused..].contains("libruntime.so may pass Sublet by"), "{text}");
    assert!(
        text[refused..].contains("start it with `sublet run`; or pause it from inside"),
        "{text}"
    );
    assert_eq!(text.matches("outside 0").count(), 1, "a second time it was paused already: {text}");
    assert!(text.contains("\npause 0\n") && text.contains("\nresume 0, wrong words 0"), "{text}");
    assert_eq!(said.own_bytes(0), BLOCK_BYTES);
    let notes = said.json[0]["notes"].to_string();
    assert!(notes.contains("can only be paused from inside"), "{notes}");
}

#[test]
fn full_relro_is_opened_and_closed_again() {
    let stage = Stage::new();
    let full = ["-Wl,-z,now,-z,relro"];
    stage.library_as("runtime", &full);
    let program = stage.program_as("attach", &full);
    let words = ["runtime", "attach", "malloc", "stats", "pause", "resume", "report", "rights"];
    let said = Said::by(&stage, Preload::Without, &program, &words);
    assert_eq!(said.own_bytes(0), BLOCK_BYTES);
    assert_eq!(row(&said.json[1], "libruntime.so")["slots"], 1);
    assert_eq!(said.lines.last().map(String::as_str), Some("rights r--p"), "{:?}", said.lines);
}

#[test]
fn a_library_that_links_the_driver_is_bound_to_us() {
    let stage = Stage::new();
    let driver = simcuda_dir().join("libcuda.so.1");
    let driver = driver.to_str().expect("UTF-8");
    for flags in [&[driver, "-Wl,-z,lazy"], &[driver, "-Wl,-z,now"]] {
        stage.library_as("direct", flags);
        let program = stage.program("attach");
        let words = ["direct", "attach", "malloc-direct", "malloc-table", "stats", "report"];
        let said = Said::by(&stage, Preload::Without, &program, &words);
        assert_eq!(said.lines, ["direct 0", "attach 0", "malloc-direct 0", "malloc-table 0"]);
        assert_eq!(said.own_bytes(0), 2 * BLOCK_BYTES, "{flags:?}");
        // The table, and three functions that are called.
        assert_eq!(row(&said.json[1], "libdirect.so")["slots"], 4, "{flags:?}");
    }
}

#[test]
fn a_program_that_links_the_driver_is_bound_to_us() {
    let stage = stage();
    let driver = simcuda_dir().join("libcuda.so.1");
    // The driver comes before us in the order of the whole program then.
    let program = stage.program_with("attach", &driver);
    let said = Said::by(
        &stage,
        Preload::Without,
        &program,
        &["attach", "default=cuMemAlloc_v2", "default=cuInit", "runtime", "malloc", "stats"],
    );
    assert_eq!(
        said.lines,
        ["attach 0", "cuMemAlloc_v2 libsublet.so", "cuInit libcuda.so.1", "malloc 0"]
    );
    assert_eq!(said.own_bytes(0), BLOCK_BYTES);
}

#[test]
fn users_of_nccl_are_bound_to_us_before_and_after_the_attach() {
    let stage = Stage::new();
    let nccl = stage.nccl(1000);
    stage.nccl_user("libearly.so", &nccl);
    stage.nccl_user("liblate.so", &nccl);
    let program = stage.program("attach");
    let words = ["use=libearly.so", "attach", "use=libearly.so", "use=liblate.so", "report"];
    let said = Said::by(&stage, Preload::Without, &program, &words);
    assert_eq!(
        said.lines,
        [
            "nccl 1001, by name libnccl1000.so",
            "attach 0",
            "nccl 1001, by name libsublet.so",
            "nccl 1001, by name libsublet.so",
        ]
    );
    assert_eq!(row(&said.json[0], "libearly.so")["slots"], 1);
    let listed = said.json[0]["libraries"].to_string();
    assert!(!listed.contains("libnccl1000.so"), "its own functions stay its own: {listed}");
}

#[test]
fn libraries_that_come_and_go_are_followed() {
    let stage = stage();
    stage.library("local");
    let program = stage.program("attach");
    let around = ["close=liblocal.so", "attach", "close=liblocal.so", "close=liblocal.so"];
    let words = [&around[..], &["report", "runtime", "malloc", "stats"]].concat();
    let said = Said::by(&stage, Preload::Without, &program, &words);
    assert!(!said.json[0]["libraries"].to_string().contains("liblocal.so"), "it was closed");
    assert_eq!(said.own_bytes(1), BLOCK_BYTES);
}

#[test]
fn a_forked_child_of_an_attached_process_looks_names_up() {
    let stage = stage();
    let program = stage.program("attach");
    let words = ["attach", "fork", "runtime", "malloc", "fork", "pause", "resume"];
    let said = Said::by(&stage, Preload::Without, &program, &words);
    let wanted =
        ["attach 0", "child 0", "malloc 0", "child 0", "pause 0", "resume 0, wrong words 0"];
    assert_eq!(said.lines, wanted);
}

#[test]
fn the_tenant_is_the_one_that_is_named_first() {
    let stage = stage();
    let program = stage.program("attach");
    let words = ["attach=one", "attach=two", "attach", "report", "runtime", "malloc", "attach=two"];
    let more = ["attach", "attach=one", "attach=not/a/name", "report"];
    let said = Said::by(&stage, Preload::Without, &program, &[&words[..], &more].concat());
    assert_eq!(said.json[0]["tenant"], "two", "nothing was joined, so that it could be changed");
    let text = said.lines.join("\n");
    let wanted = "attach 0\nattach 0\nattach 0\nmalloc 0\nattach 0\nattach 0\nattach 1\n\
                  this process is in tenant two";
    assert!(text.starts_with(wanted), "{text}");
    assert_eq!(text.matches("attach 1").count(), 2, "{text}");
    assert_eq!(said.json[1]["tenant"], "two");
}

#[test]
fn attaching_under_preload_finds_everything_hooked() {
    let stage = stage();
    let program = stage.program("attach");
    let words = ["runtime", "malloc", "attach", "report", "malloc", "stats", "pause", "resume"];
    let said = Said::by(&stage, Preload::With, &program, &words);
    let report = &said.json[0];
    assert_eq!(row(report, "libruntime.so")["state"], "hooked", "{report}");
    assert_eq!(row(report, "/attach")["why"], "libsublet.so is preloaded");
    assert_eq!(report["launches_are_held"], true);
    assert_eq!(said.own_bytes(1), 2 * BLOCK_BYTES);
}

#[test]
fn attaching_while_threads_load_look_up_and_unload_harms_nobody() {
    let stage = stage();
    stage.library("local");
    stage.library_as("relro", &["-Wl,-z,now,-z,relro"]);
    let program = stage.program("attach");
    let attaches = ["attach"; 50];
    let words =
        [&["storm"], &attaches[..], &["calm", "runtime", "malloc", "report", "stats"]].concat();
    let said = Said::by(&stage, Preload::Without, &program, &words);
    let wanted = [&["attach 0"; 50][..], &["wrong answers 0", "malloc 0"]].concat();
    assert_eq!(said.lines, wanted);
    assert_eq!(said.json[0]["launches_are_held"], true, "{}", said.json[0]);
    assert_eq!(said.own_bytes(1), BLOCK_BYTES);
}
