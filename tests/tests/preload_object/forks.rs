//! Children of a process that has opened libraries: what they use works as without us.

use std::fs;
use std::path::Path;
use std::process::Command;

use sublet_tests::Files;

use crate::stage::{Preload, Stage, simcuda_dir, transcript};

fn command(stage: &Stage, program: &Path, preload: Preload, words: [&str; 3]) -> Command {
    let mut command = stage.command(program, preload);
    let folders = [simcuda_dir(), Files::library_dir("simnvml")];
    let path = std::env::join_paths(folders).expect("folders without a colon");
    command.env("LD_LIBRARY_PATH", path).args(words);
    command
}

#[test]
fn a_child_uses_what_it_likes_whatever_its_parent_has_opened() {
    let stage = Stage::new();
    let program = stage.program("forks");
    stage.library("runtime");
    stage.nccl(3);
    for before in ["nothing", "nvml", "driver", "runtime", "nccl", "names"] {
        for using in ["driver", "runtime"] {
            for how in ["fork", "vfork", "spawn", "forkserver"] {
                let words = [before, using, how];
                let [without, with] = [Preload::Without, Preload::With].map(|preload| {
                    let output = command(&stage, &program, preload, words).output();
                    transcript(&output.expect("the program starts"))
                });
                assert_eq!(with, without, "{words:?}");
                assert!(with.ends_with("ended 0\n"), "{words:?}: {with}");
            }
        }
    }
}

/// Programs read the driver's list of refused calls when something is wrong.
#[test]
fn our_look_ups_leave_nothing_on_the_drivers_list_of_refused_calls() {
    let stage = Stage::new();
    let program = stage.program("forks");
    stage.library("runtime");
    let lists = [Preload::Without, Preload::With].map(|preload| {
        let list = stage.path(if preload == Preload::With { "with" } else { "without" });
        let mut command = command(&stage, &program, preload, ["nothing", "runtime", "fork"]);
        transcript(&command.env("CUDA_LOG_FILE", &list).output().expect("the program starts"));
        fs::read_to_string(list).unwrap_or_default()
    });
    assert_eq!(lists[1], lists[0]);
    assert_eq!(lists[0].lines().count(), 1, "{lists:?}");
}

/// Libraries ask for a name of the driver's to learn whether CUDA is in the process.
#[test]
fn a_name_is_found_only_where_it_would_be_found_without_us() {
    let stage = Stage::new();
    let program = stage.program("absent");
    let driver = simcuda_dir().join("libcuda.so.1");
    let driver = driver.to_str().expect("UTF-8");
    stage.library_as("absent_asker", &["-Wl,--no-as-needed", driver]);
    let text = stage.same(&program, &["alone"]);
    assert!(text.starts_with("weak: 0 0 0 0 0 0 0 0\n"), "{text}");
    assert!(text.contains("cuMemAlloc_v2 0000"), "{text}");
    let text = stage.same(&program, &["with-asker"]);
    assert!(text.contains("asker finds 1 1 0\n"), "{text}");
}
