//! What commands print for programs, against the schema that programs are written by.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::{Value, json};
use sublet_tests::{JobOptions, MIB, Outcome, Spmd, SpmdOptions, Stage, Trouble};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];
/// Definitions that take a death, a second family, NVIDIA's management library, or a control group with a limit.
const NOT_HERE: [&str; 9] = [
    "FailedProcess",
    "GroupIdentity",
    "HeldOnGpu",
    "LeftOnGpus",
    "Lent",
    "Occupant",
    "Outside",
    "ProcessName",
    "StageLeft",
];

/// `docs/sublet.schema.json`, and which of its definitions documents have met.
struct Schema {
    definitions: Value,
    met: BTreeSet<String>,
}

impl Schema {
    fn new() -> Outcome<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/sublet.schema.json");
        let mut root: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
        be_strict(&mut root)?;
        Ok(Self { definitions: root["$defs"].take(), met: BTreeSet::new() })
    }

    /// Fails if `document` is not as the definition `name` says.
    fn check(&mut self, name: &str, document: &Value) -> Outcome {
        let schema = json!({ "$ref": format!("#/$defs/{name}"), "$defs": self.definitions });
        let validator = jsonschema::validator_for(&schema)?;
        if let Some(error) = validator.iter_errors(document).next() {
            let place = error.instance_path();
            return Err(Trouble::new(format!("{name}{place}: {error}: {document}")));
        }
        let told = serde_json::to_string(&validator.evaluate(document).list())?;
        let names = told.split("$defs/").skip(1);
        self.met.extend(names.filter_map(|rest| Some(rest.split(['/', '"']).next()?.to_owned())));
        Ok(())
    }

    /// Definitions that no document has met.
    fn unmet(&self) -> Vec<&String> {
        let all = self.definitions.as_object().into_iter().flat_map(serde_json::Map::keys);
        all.filter(|name| !self.met.contains(*name)).collect()
    }
}

/// The schema lets fields be added, for the programs of today to read the documents of tomorrow. Here a field that it does not
/// describe is an error, and so is one that may be left out.
fn be_strict(schema: &mut Value) -> Outcome {
    match schema {
        Value::Array(parts) => parts.iter_mut().try_for_each(be_strict)?,
        Value::Object(keywords) => {
            if let Some(Value::Object(described)) = keywords.get("properties") {
                let required = keywords.get("required").and_then(Value::as_array);
                let required = required.into_iter().flatten().filter_map(Value::as_str);
                if !required.collect::<BTreeSet<_>>().into_iter().eq(described.keys()) {
                    let names: Vec<_> = described.keys().collect();
                    let what = format!("the schema lets some of {names:?} be left out");
                    return Err(Trouble::new(what));
                }
                keywords.insert("additionalProperties".to_owned(), json!(false));
            }
            keywords.values_mut().try_for_each(be_strict)?;
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
    Ok(())
}

#[test]
fn a_document_that_differs_is_refused_with_the_place() -> Outcome {
    let mut definitions = json!({
        "x": { "required": ["a", "b"], "properties": { "a": { "$ref": "#/$defs/y" }, "b": true } },
        "y": { "type": "integer" },
    });
    be_strict(&mut definitions)?;
    let mut schema = Schema { definitions, met: BTreeSet::new() };
    for (bad, what) in [
        (json!({ "a": 1 }), "\"b\" is a required"),
        (json!({ "a": 1, "b": 2, "c": 3 }), "'c' was unexpected"),
        (json!({ "a": "1", "b": 2 }), "x/a: "),
    ] {
        let said = schema.check("x", &bad).unwrap_err().to_string();
        assert!(said.contains(what), "{said}");
    }
    assert_eq!(schema.unmet(), ["x", "y"]);
    schema.check("x", &json!({ "a": 1, "b": null }))?;
    assert_eq!(schema.unmet(), [""; 0]);
    assert!(be_strict(&mut json!({ "properties": { "a": true }, "required": [] })).is_err());
    Ok(())
}

struct Checked {
    stage: Stage,
    schema: Schema,
}

impl Checked {
    fn new() -> Outcome<Self> {
        Ok(Self { stage: Stage::new(&CAPACITIES)?, schema: Schema::new()? })
    }

    /// What the command prints, which is as the definition `kind` says.
    fn run(&mut self, kind: &str, code: i32, arguments: &[&str]) -> Outcome<Value> {
        let document =
            self.stage.sublet(&[arguments, &["--json"]].concat())?.exited(code)?.json()?;
        self.schema.check(kind, &document)?;
        Ok(document)
    }
}

/// The only GPU that a tenant has memory on.
fn gpu_of(stage: &Stage, tenant: &str) -> Outcome<Value> {
    Ok(stage.members(tenant)?[0]["pool"]["devices"][0]["uuid"].clone())
}

#[test]
fn every_command_that_fails_says_why_in_one_word() -> Outcome {
    let mut checked = Checked::new()?;
    let dir = checked.stage.run_dir_path().join("saved");
    for (kind, words) in [
        ("failed", &["stats", "nobody"][..]),
        ("failed", &["prepare", "nobody"]),
        ("failed", &["save", "nobody", &dir.to_string_lossy()]),
        ("failed", &["budget", "nobody"]),
        ("change", &["pause", "nobody"]),
        ("change", &["resume", "nobody"]),
        ("change", &["resume", "nobody", "--queue"]),
        ("switch", &["switch", "nobody"]),
    ] {
        let said = checked.run(kind, 1, words)?;
        assert_eq!(said["code"], "no-such-tenant", "{words:?}: {said}");
    }
    let swap = checked.run("swap", 1, &["swap", "nobody", "somebody"])?;
    assert_eq!([&swap["code"], &swap["resumed"]["code"]], ["no-such-tenant"; 2]);
    assert_eq!(swap["paused"], Value::Null);
    assert_eq!(checked.run("failed", 2, &["swap", "a", "a"])?["code"], "usage");

    // Others may read the run directory: no command goes near it.
    let open = checked.stage.run_dir_path().join("open");
    std::fs::create_dir(&open)?;
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777))?;
    for words in [&["ps"][..], &["stats"], &["turns"], &["pause", "nobody"]] {
        let words = [words, &["--json"]].concat();
        let ran = checked.stage.sublet_told("SUBLET_RUN_DIR", &open.to_string_lossy(), &words)?;
        let said = ran.exited(1)?.json()?;
        checked.schema.check("failed", &said)?;
        assert_eq!(said["code"], "run-dir", "{words:?}: {said}");
    }
    Ok(())
}

#[test]
fn every_document_is_as_the_schema_says() -> Outcome {
    let mut checked = Checked::new()?;
    checked.run("view", 0, &["ps"])?;
    let options = JobOptions { tensor_mib: 48, ..JobOptions::new("train", 2) };
    let mut train = checked.stage.connected_job(&options)?;
    checked.run("view", 0, &["stats", "train"])?;
    checked.run("budget", 0, &["budget", "train", "0=120MiB"])?;
    checked.run("view", 0, &["ps"])?;
    checked.run("budget", 0, &["budget", "train", "none"])?;
    checked.run("prepare", 0, &["prepare", "train"])?;
    checked.run("plan", 0, &["pause", "train", "--dry-run"])?;
    checked.run("change", 0, &["pause", "train"])?;
    checked.run("changes", 0, &["pause", "--all"])?;
    let shown = checked.run("view", 0, &["ps"])?;
    let member = &shown["tenants"][0]["members"][0];
    assert!(member["member"]["id"].is_string() && member["member"]["asked"]["round"].is_string());
    let saved = checked.stage.run_dir_path().join("saved");
    checked.run("save", 0, &["save", "train", &saved.to_string_lossy()])?;
    let again = checked.run("failed", 2, &["save", "train", &saved.to_string_lossy()])?;
    assert_eq!(again["code"], "usage");

    let infer = checked
        .stage
        .connected_job(&JobOptions { tensor_mib: 80, ..JobOptions::new("infer", 1) })?;
    let refused = checked.run("change", 1, &["resume", "train"])?;
    assert_eq!(refused["shortages"][0]["uuid"], gpu_of(&checked.stage, "infer")?);
    assert_eq!(refused["code"], "gpu-full");
    let failure = &refused["failures"][0]["failure"];
    assert_eq!(
        (&failure["code"], &refused["failures"][0]["step"]),
        (&json!("gpu-full"), &json!("create"))
    );
    assert!(failure["missing_bytes"].is_u64(), "{refused}");
    checked.run("swap", 0, &["swap", "infer", "train"])?;
    checked.run("swap", 0, &["swap", "train", "infer"])?;
    checked.run("switch", 0, &["switch", "train", "--dry-run"])?;
    checked.run("switch", 0, &["switch", "train", "--wait=30s"])?;
    checked.run("switch", 0, &["switch", "infer", "--wait=30s"])?;
    checked.run("switch", 1, &["switch", "nobody"])?;
    let mut taker = checked.stage.turn_taker("taker", &["--class", "background"], 1)?;
    taker.do_it("begin 60000")?;
    let turns = checked.run("turns", 0, &["turns"])?;
    assert_eq!(turns["claims"][0]["class"], "background");
    taker.exit()?;
    infer.exit()?;
    train.ranks[0].kill()?;
    checked.run("change", 1, &["resume", "train"])?;
    let nobody = checked.run("change", 1, &["pause", "nobody"])?;
    assert_eq!(nobody["code"], "no-such-tenant");
    checked.run("doctor", 0, &["doctor"])?;

    let mut tagged = checked.stage.hoard("tagged", &[], &[])?;
    for line in ["tag kv", "create 1 4194304", "untag"] {
        tagged.do_it(line)?;
    }
    let stands = checked.run("change", 0, &["pause", "tagged", "--tag", "kv"])?;
    assert_eq!(stands["report"]["stands_still"], true, "{stands}");
    let shown = checked.run("view", 0, &["stats", "tagged"])?;
    let without = &shown["tenants"][0]["members"][0]["member"]["stands_without"];
    assert_eq!(*without, json!({ "Named": ["kv"] }), "{shown}");
    checked.run("change", 0, &["resume", "tagged"])?;
    tagged.exits_well()?;

    let options = SpmdOptions { stuck: Some((0, 5)), ..SpmdOptions::new("data", 2, 20) };
    let job = Spmd::start(&checked.stage, &options)?;
    let shown = checked.run("view", 0, &["stats", "spmd"])?;
    assert!(shown["tenants"][0]["members"][0]["communicators"][0]["communicator"].is_string());
    job.ranks[1].stop()?;
    let shown = checked.run("view", 0, &["stats", "spmd"])?;
    assert_eq!(shown["tenants"][0]["failures"][0]["who"]["pid"], job.ranks[1].pid());
    assert_eq!(shown["tenants"][0]["silent"][0]["pid"], job.ranks[1].pid());
    assert_eq!(shown["tenants"][0]["silent"][0]["standing"], "stopped");
    drop(job);
    std::os::unix::fs::symlink("/tmp", checked.stage.run_dir_path().join("link"))?;
    let shown = checked.run("view", 0, &["ps"])?;
    assert_eq!(shown["refused"][0]["tenant"], "link");
    let mut unmet = checked.schema.unmet();
    unmet.retain(|name| !NOT_HERE.contains(&name.as_str()));
    assert_eq!(unmet, [""; 0], "definitions that nothing was printed for");
    Ok(())
}
