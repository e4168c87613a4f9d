//! The recorded runs of `benchmarks/results`: `benchmarks/README.md` has the schema.

use serde_json::Value;

use super::{Finding, has_extension};

const FOLDER: &str = "benchmarks/results/";
/// A recorded run is text that people read and git keeps.
const BYTES_MAX: usize = 200 * 1024;
const TEXTS: [&str; 4] = ["name", "date", "commit", "driver"];
const OBJECTS: [&str; 4] = ["versions", "parameters", "samples", "baseline"];

/// Finds what breaks the schema in one file; nothing in files of other folders.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    if !path.starts_with(FOLDER) || !has_extension(path, "json") {
        return Vec::new();
    }
    let mut faults = Vec::new();
    if text.len() > BYTES_MAX {
        faults.push(format!("{} bytes, more than {BYTES_MAX}", text.len()));
    }
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Array(records)) if records.is_empty() => {
            faults.push("holds no record".to_owned());
        }
        Ok(Value::Array(records)) => faults.extend(records.iter().flat_map(record_faults)),
        Ok(record) => faults.extend(record_faults(&record)),
        Err(error) => faults.push(error.to_string()),
    }
    faults.into_iter().map(|fault| Finding::new(path, 1, fault, "record the run again")).collect()
}

fn record_faults(record: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for name in TEXTS {
        if !is_text(&record[name]) {
            faults.push(format!("`{name}` is not a text"));
        }
    }
    if !is_text(&record["gpu"]) && !is_text(&record["gpu"]["name"]) {
        faults.push("`gpu` names no GPU".to_owned());
    }
    for name in OBJECTS {
        if !record[name].is_object() {
            faults.push(format!("`{name}` is not an object"));
        }
    }
    // A job that only says yes or no has verdicts instead of figures.
    let has_verdicts = record["checks"].as_array().is_some_and(|checks| !checks.is_empty());
    if !has_number(&record["samples"]) && !has_verdicts {
        faults.push("`samples` holds no numbers".to_owned());
    }
    if record["status"] == "running" {
        faults.push("the run did not end".to_owned());
    }
    faults
}

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

fn has_number(value: &Value) -> bool {
    match value {
        Value::Number(_) => true,
        Value::Array(values) => values.iter().any(has_number),
        Value::Object(fields) => fields.values().any(has_number),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn recorded() -> Value {
        json!({
            "name": "nccl", "date": "2026-01-02", "commit": "abc1234", "status": "passed",
            "gpu": {"name": "H200", "count": 2}, "driver": "580",
            "versions": {"nccl": "2.28.9"}, "parameters": {"ranks": 2},
            "samples": {"pause_s": [0.3, 0.1, 0.2]}, "baseline": {},
        })
    }

    fn found(file: &Value) -> Vec<String> {
        let found = check("benchmarks/results/a.json", &file.to_string());
        found.into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn whole_record_has_no_faults_alone_and_in_a_list() {
        assert_eq!(found(&recorded()), [""; 0]);
        assert_eq!(found(&json!([recorded(), recorded()])), [""; 0]);
    }

    #[test]
    fn missing_fields_are_named() {
        let mut record = recorded();
        record["gpu"] = json!({"name": null});
        record["versions"] = json!([]);
        record["samples"] = json!({"pause_s": []});
        record["status"] = json!("running");
        record["name"] = json!("x".repeat(BYTES_MAX));
        let faults = found(&json!([record]));
        assert!(faults[0].ends_with("more than 204800"), "{faults:?}");
        assert_eq!(
            faults[1..],
            [
                "`gpu` names no GPU",
                "`versions` is not an object",
                "`samples` holds no numbers",
                "the run did not end",
            ]
        );
        assert_eq!(found(&json!([])), ["holds no record"]);
        assert_eq!(check("other/a.json", "no JSON"), []);
    }
}
