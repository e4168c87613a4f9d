//! What becomes of a process that has joined when it forks and when it ends.

use crate::stage::{CAPACITY_BYTES, Preload, Stage, transcript};

#[test]
fn a_forked_child_is_a_stranger_and_its_parent_unharmed() {
    let stage = Stage::new();
    let program = stage.program("fork");
    let output = stage.command(&program, Preload::With).output().expect("it starts");
    assert_eq!(
        transcript(&output),
        "child: allocation 3, stats -1, paused 0\n\
         child ended 0\n\
         child runs another program\n\
         child ended 0\n\
         child's child ended 0\n\
         child ended 0\n\
         after: pause 0, paused 1, resume 0\n\
         after: sum 35840, allocation 0\n"
    );
    assert_eq!(stage.free_bytes(), [CAPACITY_BYTES; 2]);
}

#[test]
fn a_forked_child_behaves_as_without_us() {
    let stage = Stage::new();
    let program = stage.program("fork");
    let text = stage.same(&program, &["child-only"]);
    assert_eq!(text, "child: allocation 3\nchild ended 0\n");
}

#[test]
fn a_child_that_no_handler_is_told_of_ends_without_its_parents_socket() {
    let stage = Stage::new();
    let program = stage.program("fork");
    let output = stage.command(&program, Preload::With).arg("unseen").output();
    let text = transcript(&output.expect("it starts"));
    assert_eq!(text, "unseen child ended 0\nsockets: 2, the same 1\n");
}

#[test]
fn a_process_that_ends_takes_its_socket_along() {
    let stage = Stage::new();
    let program = stage.program("fork");
    let output = stage.command(&program, Preload::With).output().expect("it starts");
    transcript(&output);
    let mut left = Vec::new();
    let mut folders = vec![stage.path("run")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a directory") {
            let entry = entry.expect("an entry");
            let kind = entry.file_type().expect("a kind");
            if kind.is_dir() {
                folders.push(entry.path());
            } else if std::os::unix::fs::FileTypeExt::is_socket(&kind) {
                left.push(entry.path());
            }
        }
    }
    assert!(left.is_empty(), "{left:?}");
}
