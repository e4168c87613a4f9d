use std::fs;
use std::path::Path;

use clap::CommandFactory as _;

use super::*;

fn parse(line: &str) -> Result<Command, clap::Error> {
    let words = plain(line.split_whitespace().map(OsString::from));
    Cli::try_parse_from(words).map(|cli| cli.command)
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn the_command_to_run_keeps_its_own_options() {
    for line in [
        "sublet run --tenant train -- torchrun --nproc-per-node 4 train.py -- x",
        "sublet run --tenant train torchrun --nproc-per-node 4 train.py -- x",
    ] {
        let Command::Run(args) = parse(line).unwrap() else {
            panic!("{line}");
        };
        assert_eq!(args.tenant.unwrap().as_str(), "train");
        assert_eq!(args.command, ["torchrun", "--nproc-per-node", "4", "train.py", "--", "x"]);
    }
}

#[test]
fn bad_usage_is_refused() {
    for line in [
        "sublet",
        "sublet run",
        "sublet run --tenant train",
        "sublet run --tenant ../x -- true",
        "sublet run --gpus 2 -- true",
        "sublet run --tennant train -- true",
        "sublet run -n train true",
        "sublet simulate --gpu 2 -- true",
        "sublet pause train --timeout fast",
        "sublet pause train --deep --tag kv",
        "sublet pause train --all",
        "sublet pause train --keep-running",
        "sublet pause train --deep --leave-lent",
        "sublet pause --all --tag kv",
        "sublet pause train --dry-run --deep",
        "sublet pause train --json -v",
        "sublet swap train infer --deep --out-tag kv",
        "sublet swap train",
        "sublet switch",
        "sublet switch train infer",
        "sublet switch train --dry-run --wait",
        "sublet run --tenant train --class urgent -- true",
        "sublet run --tenant train --weight 0 -- true",
        "sublet prepare",
        "sublet prepare train other",
        "sublet save train",
        "sublet wake train",
        "sublet trace train",
        "sublet metrics --every 5s",
        "sublet metrics --listen localhost",
        "sublet metrics --listen 9400 --textfile a.prom",
        "sublet metrics --listen 9400 --every 5s",
        "sublet completions tcsh",
        "sublet top",
        "sublet bug-report train",
        "sublet man",
        "sublet budget",
        "sublet budget train 60PB",
        "sublet budget train gpu=1GiB",
        "sublet run --tenant train --budget 0=0 -- true",
        "sublet simulate",
        "sublet simulate --gpus 0 -- true",
        "sublet simulate --gpus 17 -- true",
        "sublet simulate --memory 1MiB -- true",
        "sublet simulate --memory much -- true",
    ] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn options_are_read() {
    let Command::Resume(args) = parse("sublet resume a --wait=90 --json").unwrap() else {
        panic!();
    };
    assert_eq!(args.wait.at_most(), Duration::from_secs(90));
    assert!(args.show.json && !args.without_lost);
    for line in ["sublet resume a --wait 90s", "sublet resume --wait 90s --tenant a"] {
        let Command::Resume(args) = parse(line).unwrap() else { panic!() };
        assert_eq!((args.wait.at_most(), args.tenant.as_str()), (Duration::from_secs(90), "a"));
    }
    let Command::Ps(args) = parse("sublet status --tenant=a -v").unwrap() else { panic!() };
    assert!(args.of.tenant.is_some() && args.of.show.verbose);
    let Command::Swap(args) = parse("sublet swap --wait a b").unwrap() else {
        panic!();
    };
    assert_eq!(args.wait.at_most(), Duration::MAX);
    let Command::Resume(args) = parse("sublet resume a").unwrap() else {
        panic!();
    };
    assert_eq!(args.wait.at_most(), Duration::ZERO);
    for (line, wanted) in [
        ("sublet metrics --listen", "127.0.0.1:9400"),
        ("sublet metrics --listen 9401", "127.0.0.1:9401"),
        ("sublet metrics --listen 10.0.0.7:9400", "10.0.0.7:9400"),
    ] {
        let Command::Metrics(args) = parse(line).unwrap() else {
            panic!();
        };
        assert_eq!(args.listen, wanted.parse().ok(), "{line}");
    }
    let Command::Stats(args) = parse("sublet stats").unwrap() else {
        panic!();
    };
    assert!(args.tenant.is_none());
}

#[test]
fn help_of_each_command_is_short_and_ends_with_an_example_that_can_be_typed() {
    let mut whole = Cli::command();
    whole.build();
    for command in whole.get_subcommands_mut().filter(|it| it.get_name() != "help") {
        let name = command.get_name().to_owned();
        let text = command.render_help().to_string();
        assert!(text.lines().count() < 25, "{name}:\n{text}");
        let example = text.trim_end().rsplit_once("Example: ").map_or("", |(_, line)| line);
        let example = example.trim_start_matches("source <(").trim_end_matches(')');
        assert!(parse(example).is_ok(), "{name}: {example}");
    }
}

/// Finds the commands that pages show: code that begins with this command's name, each with the page.
fn shown() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut found = Vec::new();
    for page in pages.chain([root.join("README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        let parts: Vec<_> = text.split("```").collect();
        let blocks = parts.iter().skip(1).step_by(2).flat_map(|block| block.lines());
        let spans = parts.iter().step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2));
        let ours = blocks.chain(spans).filter(|code| code.starts_with("sublet "));
        found.extend(ours.map(|code| (page.display().to_string(), code.replace('\n', " "))));
    }
    found
}

#[test]
fn pages_show_commands_and_options_that_there_are() {
    let cli = Cli::command();
    let shown = shown();
    assert!(shown.len() > 50, "{} commands in all pages", shown.len());
    for (page, line) in shown {
        let line = line.split(['#', '|', '>', '&']).next().unwrap_or_default();
        let words: Vec<_> =
            line.split_whitespace().skip(1).take_while(|word| *word != "--").collect();
        let Some((first, rest)) = words
            .split_first()
            .filter(|(first, _)| first.bytes().all(|byte| byte.is_ascii_lowercase()))
        else {
            continue;
        };
        let command = cli.find_subcommand(first);
        let command = command.unwrap_or_else(|| panic!("{page}: there is no `{line}`"));
        let known: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        for word in rest.iter().filter_map(|word| word.trim_start_matches('[').strip_prefix("--")) {
            let name = word.split(['=', '[', ']']).next().unwrap_or_default();
            assert!(name == "help" || known.contains(&name), "{page}: `{line}` has no --{name}");
        }
    }
}
