//! Tenants that take turns on their GPUs, by the real command and by `sublet_turn_begin`.

use std::time::Duration;

use serde_json::Value;
use sublet_tests::{Job, JobOptions, MIB, Outcome, Rank, Stage, Trouble};

const WAIT: Duration = Duration::from_mins(2);
/// For several turns and switches on a busy machine.
const ROUNDS: Duration = Duration::from_mins(5);

/// A job that fills most of a device of 128 MiB.
fn large(tenant: &str) -> JobOptions {
    JobOptions { tensor_mib: 60, ..JobOptions::new(tenant, 1) }
}

fn runs(job: &mut Job) -> Outcome {
    job.step(1)?;
    job.verify().map(drop)
}

/// Where it must succeed, processes of a busy machine may be late with an answer.
fn switch(stage: &Stage, tenant: &str, words: &[&str], code: i32) -> Outcome<Value> {
    let wait: &[&str] = if code == 0 && words.is_empty() { &["--wait=2m"] } else { &[] };
    stage.sublet(&[&["switch", tenant, "--json"], words, wait].concat())?.exited(code)?.json()
}

/// As [`switch`], without a wait: once more where a process was late with an answer.
fn settled(stage: &Stage, tenant: &str, words: &[&str], code: i32) -> Outcome<Value> {
    let ask = || stage.sublet(&[&["switch", tenant, "--json"], words].concat());
    let mut ran = ask()?;
    until("all answer in time", || {
        let said = ran.json()?;
        let was_late = said["retryable"] == true && said.to_string().contains("not answer");
        if was_late {
            ran = ask()?;
        }
        Ok(!was_late)
    })?;
    ran.exited(code)?.json()
}

/// Tenants in their turn, and those that wait.
fn claims(stage: &Stage) -> Outcome<(Vec<String>, Vec<String>)> {
    let shown = stage.sublet(&["turns", "--json"])?.succeeded()?.json()?;
    let of = |is_in_turn: bool| {
        let claims = shown["claims"].as_array().into_iter().flatten();
        let claims = claims.filter(|claim| claim["is_in_turn"] == is_in_turn);
        claims.map(|claim| claim["tenant"].as_str().unwrap_or_default().to_owned()).collect()
    };
    Ok((of(true), of(false)))
}

fn until(what: &str, is_so: impl FnMut() -> Outcome<bool>) -> Outcome {
    sublet_tests::until(what, WAIT, is_so)
}

/// `train` and `infer`, each with a block that fills most of a device of 24 MiB; `infer` is there, and `train` paused.
fn pair(words: [&[&str]; 2]) -> Outcome<(Stage, Rank, Rank)> {
    let stage = Stage::new(&[24 * MIB])?;
    let mut train = stage.turn_taker("train", words[0], 0)?;
    train.do_it("allocate 14 100")?;
    stage.pause("train")?;
    let mut infer = stage.turn_taker("infer", words[1], 0)?;
    infer.do_it("allocate 14 200")?;
    Ok((stage, train, infer))
}

#[test]
fn a_switch_pauses_what_is_in_the_way_and_nobody_else() -> Outcome {
    let stage = Stage::new(&[144 * MIB])?;
    let small = stage.connected_job(&JobOptions::new("small", 1))?;
    let mut train = stage.connected_job(&large("train"))?;
    stage.pause("train")?;
    let mut infer = stage.connected_job(&large("infer"))?;
    let said = settled(&stage, "train", &["--dry-run"], 0)?;
    assert_eq!((&said["outcome"], &said["paused"][0]), (&"would_switch".into(), &"infer".into()));
    assert_eq!(stage.states("infer")?, ["active"]);
    assert!(stage.decisions()?.is_empty(), "a dry run writes nothing down");

    let said = switch(&stage, "train", &[], 0)?;
    assert_eq!(said["paused"], serde_json::json!(["infer"]), "{said:#}");
    assert_eq!(said["changes"][1]["tenant"], "train");
    assert_eq!(stage.states("infer")?, ["paused"]);
    assert_eq!(stage.states("small")?, ["active"]);
    runs(&mut train)?;
    let lines = stage.decisions()?;
    assert!(lines[0].starts_with("'infer' (fair) is paused: "), "{lines:?}");
    assert!(lines[1].starts_with("'train' is resumed: it lacked "), "{lines:?}");

    assert_eq!(switch(&stage, "train", &[], 0)?["outcome"], "already_active");
    settled(&stage, "infer", &[], 0)?;
    runs(&mut infer)?;
    assert_eq!(stage.states("train")?, ["paused"]);
    assert_eq!(claims(&stage)?, (Vec::new(), Vec::new()));
    small.exit()
}

#[test]
fn the_lower_class_makes_way_and_several_do_where_they_must() -> Outcome {
    let stage = Stage::new(&[256 * MIB])?;
    let class =
        |tenant: &str, class: &str| large(tenant).with("SUBLET_TURNS", &format!("class={class}"));
    let mut wide =
        stage.connected_job(&JobOptions { tensor_mib: 120, ..JobOptions::new("wide", 1) })?;
    stage.pause("wide")?;
    let mut high = stage.connected_job(&class("high", "guaranteed"))?;
    let mut low = stage.connected_job(&class("low", "background"))?;
    let said = settled(&stage, "wide", &["--dry-run"], 0)?;
    let room = stage.memory(0)?.free_bytes;
    assert_eq!(said["paused"][0], "low", "{room} bytes are free: {said:#}");
    switch(&stage, "wide", &[], 0)?;
    runs(&mut wide)?;
    let shown = stage.sublet(&["ps", "--json"])?.succeeded()?.json()?;
    assert_eq!(shown["tenants"][0]["members"][0]["member"]["class"], "guaranteed");
    stage.pause("wide")?;
    for (tenant, job) in [("high", &mut high), ("low", &mut low)] {
        if stage.states(tenant)? == ["paused"] {
            stage.resume(tenant)?;
        }
        runs(job)?;
    }
    Ok(())
}

#[test]
fn a_tenant_that_fits_nowhere_and_one_that_is_not_there_change_nothing() -> Outcome {
    let stage = Stage::new(&[128 * MIB])?;
    let mut train = stage.connected_job(&large("train"))?;
    stage.pause("train")?;
    let outside = JobOptions { is_preloaded: false, tensor_mib: 50, ..JobOptions::new("none", 1) };
    let outside = stage.connected_job(&outside)?;
    let small = stage.connected_job(&JobOptions::new("small", 1))?;
    let said = settled(&stage, "train", &[], 1)?;
    let error = said["error"].as_str().unwrap_or_default();
    assert!(
        error.contains("even if all others make way") && error.contains("nothing was changed"),
        "{said}"
    );
    assert_eq!((&said["unchanged"], &said["retryable"]), (&true.into(), &false.into()));
    assert_eq!(stage.states("small")?, ["active"]);
    let said = switch(&stage, "nobody", &[], 1)?;
    assert!(said["error"].as_str().unwrap_or_default().contains("no tenant 'nobody'"), "{said}");
    outside.exit()?;
    switch(&stage, "train", &[], 0)?;
    runs(&mut train)?;
    small.exit()
}

#[test]
fn one_that_does_not_answer_makes_no_way_and_nothing_is_changed() -> Outcome {
    let (stage, _train, infer) = pair([&[], &[]])?;
    infer.stop()?;
    let said = switch(&stage, "train", &["--timeout", "1s"], 1)?;
    let error = said["error"].as_str().unwrap_or_default();
    assert!(error.contains("'train' cannot come"), "{said:#}");
    assert_eq!(stage.states("train")?, ["paused"]);
    infer.signal(nix::sys::signal::Signal::SIGCONT)?;
    switch(&stage, "train", &[], 0).map(drop)
}

/// `wide`, paused, needs the place of both others, of which one captures a graph.
#[test]
fn one_that_cannot_be_paused_is_named_and_those_paused_before_it_run_again() -> Outcome {
    let stage = Stage::new(&[48 * MIB])?;
    let mut wide = stage.turn_taker("wide", &[], 0)?;
    wide.do_it("allocate 40 1")?;
    stage.pause("wide")?;
    let mut first = stage.turn_taker("a-first", &[], 0)?;
    first.do_it("allocate 16 2")?;
    let mut captures = stage.turn_taker("captures", &[], 0)?;
    captures.do_it("allocate 16 3")?;
    captures.do_it("capture")?;
    // For so long the capture is waited for. Everything else takes less on a machine however busy.
    let said = switch(&stage, "wide", &["--timeout", "10s"], 1)?;
    let error = said["error"].as_str().unwrap_or_default();
    assert!(error.contains("is capturing 1 stream"), "{said:#}");
    assert!(error.contains("'a-first', which are active again"), "{said:#}");
    assert_eq!((&said["unchanged"], &said["retryable"]), (&true.into(), &true.into()));
    assert_eq!(stage.states("a-first")?, ["active"]);
    assert_eq!(stage.states("wide")?, ["paused"]);
    first.do_it("own 2")?;
    captures.do_it("captured")?;
    switch(&stage, "wide", &[], 0)?;
    wide.do_it("own 1").map(drop)
}

#[test]
fn the_turns_of_two_processes_of_a_tenant_are_one_that_ends_with_the_last() -> Outcome {
    let (stage, mut train, mut infer) = pair([&[], &["--weight", "100"]])?;
    let mut second = stage.turn_taker("infer", &["--weight", "100"], 0)?;
    infer.do_it("begin 120000")?;
    train.say("begin 120000")?;
    until("train waits", || Ok(claims(&stage)?.1 == ["train"]))?;
    // It joins the turn of its tenant, and does not wait behind the other.
    second.do_it("begin 120000")?;
    infer.do_it("end")?;
    assert!(train.answer_if_within(Duration::from_millis(500))?.is_none());
    second.do_it("end")?;
    assert!(train.answer()?.is_ok);
    train.do_it("own 100").map(drop)
}

#[test]
fn two_switches_at_once_go_one_after_the_other() -> Outcome {
    let (stage, mut train, mut infer) = pair([&[], &[]])?;
    let mut third = stage.turn_taker("third", &[], 0)?;
    let answers = std::thread::scope(|scope| -> Outcome<Vec<bool>> {
        let other = scope.spawn(|| switch(&stage, "train", &["--wait=120s"], 0).is_ok());
        let own = third.ask("switch train 120000")?.is_ok;
        Ok(vec![own, other.join().expect("the thread ends")])
    })?;
    assert_eq!(answers, [true, true]);
    assert_eq!(stage.states("infer")?, ["paused"]);
    train.do_it("own 100")?;
    switch(&stage, "infer", &[], 0)?;
    infer.do_it("own 200").map(drop)
}

#[test]
fn two_tenants_take_turns_for_many_rounds_and_every_byte_is_right() -> Outcome {
    let (stage, mut train, mut infer) = pair([&[], &[]])?;
    train.say("rounds 5 100")?;
    infer.say("rounds 5 200")?;
    assert_eq!(train.answer_within(ROUNDS)?.numbers::<1>()?, [105]);
    assert_eq!(infer.answer_within(ROUNDS)?.numbers::<1>()?, [205]);
    assert_eq!(claims(&stage)?, (Vec::new(), Vec::new()));
    let lines = stage.decisions()?;
    assert!(lines.iter().any(|line| line.contains("its turn is over")), "{lines:?}");
    Ok(())
}

#[test]
fn a_turn_waits_for_the_turn_in_the_way_and_says_so_at_its_deadline() -> Outcome {
    // A quantum is ten times what switching takes, and here longer than the test.
    let (stage, mut train, mut infer) = pair([&[], &["--weight", "100"]])?;
    infer.do_it("begin 120000")?;
    let answer = train.ask("begin 3000")?;
    assert!(!answer.is_ok && answer.text.contains("'infer' (fair) is in its turn"), "{answer:?}");
    assert_eq!(claims(&stage)?, (vec!["infer".to_owned()], Vec::new()));
    let said = switch(&stage, "train", &[], 1)?;
    assert_eq!(said["retryable"], true, "{said:#}");
    assert!(said["error"].as_str().unwrap_or_default().contains("--wait"), "{said:#}");
    let said = switch(&stage, "train", &["--wait=200ms"], 1)?;
    assert_eq!(said["outcome"], "failed");

    train.say("begin 120000")?;
    until("train waits", || Ok(claims(&stage)?.1 == ["train"]))?;
    infer.do_it("end")?;
    assert!(train.answer()?.is_ok);
    assert_eq!(stage.states("infer")?, ["paused"]);
    train.do_it("own 100")?;
    train.do_it("end")?;
    let answer = train.ask("end")?;
    assert!(answer.text.contains("no turn of this process"), "{answer:?}");
    Ok(())
}

#[test]
fn who_is_killed_in_its_turn_or_in_its_wait_leaves_nothing_behind() -> Outcome {
    let (stage, mut train, mut infer) = pair([&[], &["--weight", "100"]])?;
    let mut other = stage.turn_taker("other", &[], 0)?;
    other.do_it("allocate 4 300")?;
    stage.pause("other")?;
    infer.do_it("begin 120000")?;
    train.say("begin 120000")?;
    until("train waits", || Ok(claims(&stage)?.1 == ["train"]))?;
    other.say("begin 120000")?;
    until("two wait", || Ok(claims(&stage)?.1 == ["train", "other"]))?;
    train.kill()?;
    // It fits next to the turn in the way, and nobody is before it any more.
    assert!(other.answer()?.is_ok);
    other.do_it("own 300")?;
    let mut third = stage.turn_taker("third", &["--weight", "100"], 0)?;
    stage.pause("other")?;
    drop(other);
    infer.do_it("end")?;
    stage.pause("infer")?;
    third.do_it("allocate 14 400")?;
    third.do_it("begin 120000")?;
    infer.say("begin 120000")?;
    until("infer waits", || Ok(claims(&stage)?.1 == ["infer"]))?;
    third.kill()?;
    let answer = infer.answer()?;
    assert!(answer.is_ok, "{answer:?}");
    infer.do_it("own 200")?;
    infer.do_it("end")?;
    assert_eq!(claims(&stage)?, (Vec::new(), Vec::new()));
    Ok(())
}

#[test]
fn a_turn_that_has_lasted_its_quantum_is_taken_away_and_comes_back_by_itself() -> Outcome {
    let (stage, mut train, mut infer) = pair([&[], &[]])?;
    infer.do_it("begin 120000")?;
    infer.say("work 200")?;
    train.do_it("begin 120000")?;
    assert_eq!(stage.states("infer")?, ["paused"]);
    train.do_it("own 100")?;
    // Its process stands at its next use of the device, and still is in its turn: it waits to come back.
    until("infer waits", || Ok(claims(&stage)?.1 == ["infer"]))?;
    train.do_it("end")?;
    until("infer is back", || Ok(stage.states("infer")? == ["active"]))?;
    until("infer is in its turn", || Ok(claims(&stage)?.0 == ["infer"]))?;
    infer.say("stop")?;
    let [seed] = infer.answer()?.numbers::<1>()?;
    infer.do_it(&format!("own {seed}"))?;
    infer.do_it("end")?;
    let lines = stage.decisions()?;
    assert!(lines.iter().any(|line| line.contains("and its quantum is")), "{lines:?}");
    Ok(())
}

#[test]
fn a_turn_and_a_wait_for_one_outlive_the_run_directory() -> Outcome {
    // A higher class waits for its bound, however long switching takes on a busy machine.
    let (stage, mut train, mut infer) = pair([&["--class", "guaranteed"], &[]])?;
    infer.do_it("begin 120000")?;
    infer.say("work 200")?;
    train.do_it("begin 120000")?;
    until("infer waits", || Ok(claims(&stage)?.1 == ["infer"]))?;
    until("the run directory has gone", || {
        Ok(std::fs::remove_dir_all(stage.run_dir_path()).is_ok())
    })?;
    // Who is first again is in its turn, also where that was not to be seen for a moment.
    until("both have their claims again", || {
        let (in_turn, waiting) = claims(&stage)?;
        let mut all = [in_turn, waiting].concat();
        all.sort();
        Ok(all == ["infer", "train"])
    })?;
    train.do_it("end")?;
    // Not idle: that its turn is over is known though the history had gone.
    train.say("work 100")?;
    if let Err(trouble) = until("infer is in its turn", || Ok(claims(&stage)?.0 == ["infer"])) {
        let (turns, ps) = (stage.sublet(&["turns"])?.stdout, stage.sublet(&["ps"])?.stdout);
        let kept = ["history", "silent", "log"]
            .map(|name| std::fs::read_to_string(stage.run_dir_path().join(".turns").join(name)));
        let said = format!("{trouble}: {turns}{ps}; {kept:?}; infer: {}", infer.stderr());
        return Err(Trouble::new(format!("{said}; train: {}", train.stderr())));
    }
    infer.say("stop")?;
    let [seed] = infer.answer()?.numbers::<1>()?;
    infer.do_it(&format!("own {seed}"))?;
    infer.do_it("end")?;
    switch(&stage, "train", &[], 0)?;
    train.say("stop")?;
    train.answer().map(drop)
}

#[test]
fn a_forked_child_neither_ends_nor_keeps_the_turn_of_its_parent() -> Outcome {
    let stage = Stage::new(&[24 * MIB])?;
    // Begun before the process has joined its tenant.
    let mut parent = stage.turn_taker_with("train", &[], &[("STARTS_LATER", "1")], 0)?;
    parent.do_it("begin 120000")?;
    let [child] = parent.do_it("fork")?.numbers::<1>()?;
    assert_eq!(parent.do_it("child-ends")?.numbers::<1>()?, [0]);
    assert_eq!(claims(&stage)?.0, ["train"]);
    parent.kill()?;
    until("its turn is over", || Ok(claims(&stage)? == (Vec::new(), Vec::new())))?;
    let child = nix::unistd::Pid::from_raw(i32::try_from(child)?);
    nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL)?;
    Ok(())
}

#[test]
fn a_turn_that_a_forked_child_has_ended_comes_back_when_another_had_its_memory() -> Outcome {
    let stage = Stage::new(&[24 * MIB])?;
    let mut train = stage.turn_taker("train", &[], 0)?;
    train.do_it("begin 120000")?;
    let [child] = train.do_it("fork")?.numbers::<1>()?;
    train.do_it("allocate 14 100")?;
    stage.pause("train")?;
    // It waits for its bound, however long switching takes on a busy machine.
    let mut infer = stage.turn_taker("infer", &["--class", "guaranteed"], 0)?;
    infer.do_it("allocate 14 200")?;
    stage.pause("infer")?;
    stage.resume("train")?;
    assert_eq!(train.do_it("child-ends")?.numbers::<1>()?, [0]);
    infer.do_it("begin 120000")?;
    infer.do_it("end")?;
    until("train is back", || Ok(stage.states("train")? == ["active"]))?;
    train.do_it("own 100")?;
    train.do_it("end")?;
    let child = nix::unistd::Pid::from_raw(i32::try_from(child)?);
    nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL)?;
    Ok(())
}

#[test]
fn a_guaranteed_tenant_waits_for_a_background_one_no_longer_than_its_bound() -> Outcome {
    let (stage, mut train, mut infer) =
        pair([&["--class", "guaranteed"], &["--class", "background", "--weight", "100"]])?;
    infer.do_it("begin 120000")?;
    infer.say("work 200")?;
    train.do_it("begin 120000")?;
    train.do_it("own 100")?;
    // The other way round it waits for the whole turn.
    until("infer waits", || Ok(claims(&stage)?.1 == ["infer"]))?;
    assert_eq!(stage.states("infer")?, ["paused"]);
    train.do_it("end")?;
    until("infer is back", || Ok(stage.states("infer")? == ["active"]))?;
    infer.say("stop")?;
    infer.answer()?;
    Ok(())
}

#[test]
fn one_that_is_paused_by_name_in_its_turn_stays_paused() -> Outcome {
    let (stage, _train, mut infer) = pair([&[], &[]])?;
    infer.do_it("begin 120000")?;
    stage.pause("infer")?;
    let answer = infer.answer_if_within(Duration::from_millis(300))?;
    assert!(answer.is_none());
    assert_eq!(stage.states("infer")?, ["paused"]);
    stage.resume("infer")?;
    infer.do_it("own 200")?;
    infer.do_it("end").map(drop)
}

#[test]
fn gpu_sets_that_differ_make_way_where_they_meet() -> Outcome {
    let stage = Stage::new(&[64 * MIB; 2])?;
    let mut gang = stage.job(&JobOptions { tensor_mib: 8, ..JobOptions::new("gang", 2) })?;
    gang.connect()?;
    runs(&mut gang)?;
    stage.pause("gang")?;
    let mut first = stage.turn_taker("first", &[], 0)?;
    let mut second = stage.turn_taker("second", &[], 1)?;
    for one in [&mut first, &mut second] {
        one.do_it("allocate 48 7")?;
    }
    let said = switch(&stage, "gang", &[], 0)?;
    assert_eq!(said["paused"], serde_json::json!(["first", "second"]), "{said:#}");
    runs(&mut gang)?;
    switch(&stage, "second", &[], 0)?;
    assert_eq!(stage.states("gang")?, ["paused"]);
    assert_eq!(stage.states("first")?, ["paused"]);
    second.do_it("own 7")?;
    switch(&stage, "first", &[], 0)?;
    assert_eq!(stage.states("second")?, ["active"]);
    first.do_it("own 7").map(drop)
}

#[test]
fn a_turn_that_fits_nowhere_yet_comes_when_what_is_outside_has_ended() -> Outcome {
    let stage = Stage::new(&[144 * MIB])?;
    let mut train = stage.turn_taker("train", &[], 0)?;
    train.do_it("allocate 60 100")?;
    stage.pause("train")?;
    let stranger = JobOptions { tensor_mib: 80, is_preloaded: false, ..JobOptions::new("x", 1) };
    let stranger = stage.job(&stranger)?;
    train.say("begin 120000")?;
    let answer = train.answer_if_within(Duration::from_millis(500))?;
    assert!(answer.is_none(), "{answer:?}");
    stranger.exit()?;
    assert!(train.answer()?.is_ok);
    train.do_it("own 100")?;
    train.do_it("end").map(drop)
}

#[test]
fn unknown_classes_and_weights_are_refused_by_name() -> Outcome {
    let stage = Stage::new(&[64 * MIB])?;
    for words in [["--class", "urgent"], ["--weight", "0"]] {
        let ran =
            stage.sublet(&[&["run", "--tenant", "a"], &words[..], &["--", "true"]].concat())?;
        assert!(ran.exited(2)?.stderr.contains(words[1]));
    }
    for value in ["class=urgent", "weight=0"] {
        let job = ["run", "--tenant", "a", "--", "true"];
        let ran = stage.sublet_told("SUBLET_TURNS", value, &job)?;
        assert!(ran.exited(2)?.stderr.contains(&format!("SUBLET_TURNS={value}: ")));
    }
    // Options change what the environment says.
    let job = ["--weight", "3", "--", "printenv", "SUBLET_TURNS"];
    let run = [&["run", "--tenant", "a"], &job[..]].concat();
    let ran = stage.sublet_told("SUBLET_TURNS", "auto,class=background", &run)?.exited(0)?;
    assert_eq!(ran.stdout.trim(), "auto,class=background,weight=3,wait=2m");
    // A process whose program sets it is not kept from running by it, and says so.
    let job = stage.job(&JobOptions::new("train", 1).with("SUBLET_TURNS", "class=urgent"))?;
    let members = stage.members("train")?;
    assert_eq!(members[0]["member"]["class"], "fair");
    let notes = members[0]["notes"].to_string();
    assert!(notes.contains("SUBLET_TURNS=class=urgent: 'urgent' is no class"), "{notes}");
    job.exit()
}
