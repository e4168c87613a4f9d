//! `ffi/include/sublet.h` is what the library exports, in C and in C++.

use std::collections::BTreeSet;
use std::process::Command;

use crate::nccl;
use crate::stage::{Preload, Stage, exported, preload_path, root, transcript};

/// The functions that the header declares.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(root().join("ffi/include/sublet.h")).expect("the header");
    let mut code = String::new();
    let mut rest = header.as_str();
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").expect("the comment ends").1;
    }
    code.push_str(rest);
    let names = code.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let name = line.split_once('(')?.0.rsplit([' ', '*']).next()?;
        (name.starts_with("sublet_") || name.starts_with("nccl")).then(|| name.to_owned())
    });
    names.collect()
}

#[test]
fn the_header_compiles_alone_as_c_and_as_cxx() {
    let stage = Stage::new();
    let languages = [("cc", "c", "-std=c99"), ("c++", "c++", "-std=c++11")];
    for (compiler, language, standard) in languages {
        let source = stage.path("alone");
        std::fs::write(&source, "#include <sublet.h>\n#include <sublet.h>\n").expect("a file");
        let compiled = Command::new(compiler)
            .args(["-x", language, standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
            .args(["-fsyntax-only", "-I"])
            .arg(root().join("ffi/include"))
            .arg(&source)
            .status();
        match compiled {
            Ok(status) => assert!(status.success(), "as {language}"),
            // Not every machine that has a C compiler has one for C++.
            Err(error) => {
                assert_eq!((language, error.kind()), ("c++", std::io::ErrorKind::NotFound));
            }
        }
    }
}

#[test]
fn every_declared_function_is_exported_and_every_export_declared() {
    let exports = exported(&preload_path()).into_iter().filter(|name| !nccl::is_nccls(name));
    let ours = exports.filter(|name| name.starts_with("sublet_") || name.starts_with("nccl"));
    assert_eq!(ours.collect::<BTreeSet<_>>(), declared());
}

#[test]
fn c_programs_call_every_function() {
    let read = |name: &str| {
        let source = root().join(format!("tests/programs/preload_{name}.c"));
        std::fs::read_to_string(source).expect("the program")
    };
    let texts = ["header", "look", "paging", "tags"].map(read);
    for name in declared() {
        let call = format!("{name}(");
        assert!(texts.iter().any(|text| text.contains(&call)), "no program calls {name}");
    }
}

#[test]
fn memory_by_tag_works_as_a_c_program_calls_for_it() {
    let stage = Stage::new();
    let program = stage.program_with("tags", &preload_path());
    let mut command = stage.command(&program, Preload::With);
    let output = command.env("SUBLET_TENANT", "tags").output().expect("it starts");
    assert_eq!(
        transcript(&output),
        "regions 0 0 0, end 0\n\
         other policy 1\n\
         paused 0, freed 2097152, weights 1, kv 0, all 0\n\
         report 1, the rest works 8\n\
         saved 0 7, copied 0 7\n\
         not away 1\n\
         again 0\n\
         back 0 7\n\
         unknown tag 1\n\
         the tags there are 1 1\n\
         bad arguments 1 1 1 -1\n\
         both 0, freed 4194304\n\
         all tags back 0 7\n\
         paused 0, answers 1\n\
         in stages 0, kv away 1\n\
         contents 7 8\n\
         too late 1\n\
         all 0, kv away 0\n\
         files in 1 1 0, paused 0, on disk 1\n\
         in memory 1, read 0 5\n\
         back from the file 0 5\n\
         tenants 1, stats 1, swap with itself 1, by tag 1, to nobody 1\n\
         prepared 0, all 1, of nobody 1\n"
    );
}

#[test]
fn a_c_program_has_the_calls_of_amem_and_for_the_whole_tenant() {
    let stage = Stage::new();
    let program = stage.program_with("header", &preload_path());
    let output = stage.command(&program, Preload::With).output().expect("it starts");
    assert_eq!(
        transcript(&output),
        "before any memory: stats -1, paused 0, error 1, changes 0\n\
         group 0 7 0, refused 4, needs a place 4\n\
         sublet: total own=0 resident=0 imported=0\n\
         pause before any memory 0, said 1, statistics 0\n\
         region 0, wrong tag 1, wrong contents 1, other contents 1, end 0, one end too many 1\n\
         stats fit 1, too short 1, tag in them 1\n\
         set group too late 1\n\
         sublet: GPU 0 library=header tag=weights contents=Discard own=2097152 resident=2097152 imported=0\n\
         sublet: total own=2097152 resident=2097152 imported=0\n\
         statistics 0\n\
         for torch 1, nothing 0, too much 0\n\
         paused 0 1 0, again 0, resumed 0 0 0, changed 1\n\
         together 0 1, back 0 0\n\
         by command 0 1, back 0 0, no commands 3\n\
         unknown tenant 1, error 1\n\
         turns 0 0, one end too many 1, switched 0, to nobody 1\n\
         budget 0 1, none 0 1, wrong 1, of nobody 1 -1\n\
         family 1\n\
         attached 0, report 1, held 1\n"
    );
}

#[test]
fn a_c_program_uses_more_memory_than_its_frames_and_is_paused_meanwhile() {
    let stage = Stage::new();
    let program = stage.program_with("paging", &preload_path());
    let mut command = stage.command(&program, Preload::With);
    // Six chunks fit the host, and fourteen do not.
    let command = command.env("SUBLET_TENANT", "paging").env("SUBLET_HOST_BYTES_MAX", "24MiB");
    let output = command.output().expect("it starts");
    assert_eq!(
        transcript(&output),
        "opened 0, spans 6, written 6\n\
         announced 0, paused 0, resumed 0, read 6\n\
         threads 1, open to signals 0\n\
         flushed 0, report 1 1 1\n\
         too many 1 1\n\
         for the host 1 1\n\
         planned 1 1\n\
         shrunk 0, read 6\n\
         freed 0, not twice 1, closed 0, gone 1\n"
    );
}

#[test]
fn uses_of_paged_memory_that_nobody_announces_are_seen_at_launches() {
    let stage = Stage::new();
    let program = stage.program_with("look", &preload_path());
    let said = |words: &[&str]| {
        let mut command = stage.command(&program, Preload::With);
        let output = command.env("SUBLET_TENANT", "look").args(words).output().expect("it starts");
        transcript(&output)
    };
    assert_eq!(
        said(&["cases"]),
        "too many 1\n\
         replayed 1\n\
         own stream 1\n\
         not seen 1\n"
    );
    assert_eq!(
        said(&["region"]),
        "paged 0, twice 1, other policy 1\n\
         takes 0, in reach 1, outside 1\n\
         right 8, within frames 1, paused 1, right 8\n\
         not shared 1, inside 1, twice 1\n\
         again 8, too much 1, closed 0, ordinary 1\n"
    );
    assert_eq!(said(&["handle"]), "paged 0, shows 70, 90, 90, 90, 90, stays 1\n");
    assert_eq!(
        said(&["contexts"]),
        "right 16, exchanges 1, stays 0, waited for 1, behind its end 1\n"
    );
    assert_eq!(said(&["windows"]), "late 0, right 2\n");
    for seed in ["1", "2", "3"] {
        assert_eq!(
            said(&["random", seed, "2", "6"]),
            "all as written; calls 1, misses 1, exchanges 1, more than there was room for 0\n",
            "seed {seed}"
        );
    }
}
