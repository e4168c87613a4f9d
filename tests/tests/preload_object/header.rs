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
    let hooked = nccl::table();
    let exports = exported(&preload_path()).into_iter().filter(|name| !hooked.contains(name));
    let ours = exports.filter(|name| name.starts_with("sublet_") || name.starts_with("nccl"));
    assert_eq!(ours.collect::<BTreeSet<_>>(), declared());
}

#[test]
fn a_c_program_calls_every_function() {
    let source = root().join("tests/programs/preload_header.c");
    let text = std::fs::read_to_string(source).expect("the program");
    for name in declared() {
        assert!(text.contains(&format!("{name}(")), "the program does not call {name}");
    }
    let stage = Stage::new();
    let program = stage.program_with("header", &preload_path());
    let output = stage.command(&program, Preload::With).output().expect("it starts");
    assert_eq!(
        transcript(&output),
        "before any memory: stats -1, paused 0, error 1\n\
         group 0 7 0, refused 4, needs a place 4\n\
         pause before any memory 0, statistics 5\n\
         region 0, wrong tag 1, wrong contents 1, end 0, one end too many 1\n\
         stats fit 1, too short 1, tag in them 1\n\
         set group too late 1\n\
         sublet: GPU 0 library=header tag=weights contents=Discard own=2097152 resident=2097152 imported=0\n\
         sublet: total own=2097152 resident=2097152 imported=0\n\
         statistics 0\n\
         paused 0 1 0, again 0, resumed 0 0 0\n\
         together 0 1, back 0 0\n\
         unknown tenant 4, error 1\n"
    );
}
