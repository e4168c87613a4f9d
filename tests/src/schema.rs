//! Checks documents against a JSON Schema, as far as `docs/sublet.schema.json` goes: a keyword that is not known here is an
//! error, so what the schema says is what is checked. The schema lets fields be added, for the programs of today to read the
//! documents of tomorrow; here one that it does not describe is an error.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{Outcome, Trouble};

/// Keywords that say nothing about documents.
const REMARKS: [&str; 5] = ["$schema", "$id", "$defs", "title", "description"];

/// A schema, and which of its definitions documents have met.
#[derive(Debug)]
pub struct Schema {
    root: Value,
    met: BTreeSet<String>,
}

impl Schema {
    /// From its text.
    ///
    /// # Errors
    /// When it is no JSON.
    pub fn new(text: &str) -> Outcome<Self> {
        Ok(Self { root: serde_json::from_str(text)?, met: BTreeSet::new() })
    }

    /// Is `document` as the definition `name` says?
    ///
    /// # Errors
    /// What is not, and where.
    pub fn check(&mut self, name: &str, document: &Value) -> Outcome {
        let reference = serde_json::json!({ "$ref": format!("#/$defs/{name}") });
        self.at(&reference, document, name)
    }

    /// Definitions that no document has met.
    pub fn unmet(&self) -> Vec<String> {
        let all = self.root["$defs"].as_object().into_iter().flat_map(serde_json::Map::keys);
        all.filter(|name| !self.met.contains(*name)).cloned().collect()
    }

    fn at(&mut self, schema: &Value, value: &Value, place: &str) -> Outcome {
        let wrong = |what: &str| Err(Trouble::new(format!("{place}: {what}: {value}")));
        let Some(keywords) = schema.as_object() else {
            return if schema == &Value::Bool(true) {
                Ok(())
            } else {
                wrong("nothing may be here")
            };
        };
        for (keyword, wanted) in keywords {
            match keyword.as_str() {
                "$ref" => {
                    let name = wanted.as_str().and_then(|text| text.strip_prefix("#/$defs/"));
                    let Some(name) = name else { return wrong("a reference leads elsewhere") };
                    let Some(target) = self.root["$defs"].get(name).cloned() else {
                        return wrong(&format!("there is no definition {name}"));
                    };
                    self.met.insert(name.to_owned());
                    self.at(&target, value, place)?;
                }
                "type" => {
                    let one = std::slice::from_ref(wanted);
                    let types = wanted.as_array().map_or(one, Vec::as_slice);
                    if !types.iter().any(|name| is_of_type(name, value)) {
                        return wrong(&format!("is not {wanted}"));
                    }
                }
                "const" if wanted != value => return wrong(&format!("is not {wanted}")),
                "enum" if !wanted.as_array().is_some_and(|all| all.contains(value)) => {
                    return wrong(&format!("is none of {wanted}"));
                }
                "minLength" | "maxLength" => {
                    let chars = value.as_str().map(|text| text.chars().count() as u64);
                    let fits = |count: u64| match keyword.as_str() {
                        "minLength" => Some(count) >= wanted.as_u64(),
                        _ => Some(count) <= wanted.as_u64(),
                    };
                    if !chars.is_none_or(fits) {
                        return wrong(&format!("{keyword} is {wanted}"));
                    }
                }
                "items" => {
                    // Those behind the ones that are told apart.
                    let before = keywords.get("prefixItems").and_then(Value::as_array);
                    let before = before.map_or(0, Vec::len);
                    let items = value.as_array().into_iter().flatten().enumerate().skip(before);
                    for (index, item) in items {
                        self.at(wanted, item, &format!("{place}[{index}]"))?;
                    }
                }
                "prefixItems" => {
                    let wanted = wanted.as_array().into_iter().flatten();
                    let items = value.as_array().into_iter().flatten();
                    for (index, (wanted, item)) in wanted.zip(items).enumerate() {
                        self.at(wanted, item, &format!("{place}[{index}]"))?;
                    }
                }
                "minItems" => {
                    let count = value.as_array().map(|items| items.len() as u64);
                    if count.is_some() && count < wanted.as_u64() {
                        return wrong("is too short");
                    }
                }
                "properties" => self.properties(keywords, wanted, value, place)?,
                "anyOf" => {
                    let choices: Vec<_> = wanted.as_array().into_iter().flatten().collect();
                    let mut found = Vec::new();
                    for choice in choices {
                        match self.at(choice, value, place) {
                            Ok(()) => {
                                found.clear();
                                break;
                            }
                            Err(trouble) => found.push(trouble.to_string()),
                        }
                    }
                    if !found.is_empty() {
                        return wrong(&format!("fits none: {}", found.join("; ")));
                    }
                }
                "const" | "enum" | "required" => {}
                remark if REMARKS.contains(&remark) => {}
                other => return wrong(&format!("the keyword {other} is not known here")),
            }
        }
        Ok(())
    }

    /// Every field is described, and every one that is described is there.
    fn properties(
        &mut self,
        keywords: &serde_json::Map<String, Value>,
        properties: &Value,
        value: &Value,
        place: &str,
    ) -> Outcome {
        let wrong = |what: String| Err(Trouble::new(format!("{place}: {what}")));
        let Some(object) = value.as_object() else { return Ok(()) };
        let described: Vec<_> = properties.as_object().into_iter().flatten().collect();
        let required = keywords.get("required").and_then(Value::as_array);
        let required: BTreeSet<_> =
            required.into_iter().flatten().filter_map(Value::as_str).collect();
        let names: BTreeSet<_> = described.iter().map(|(name, _)| name.as_str()).collect();
        if required != names {
            return wrong("the schema lets fields be left out".to_owned());
        }
        if let Some(name) = object.keys().find(|name| !names.contains(name.as_str())) {
            return wrong(format!("the schema has no field {name}"));
        }
        for (name, wanted) in described {
            let Some(value) = object.get(name) else {
                return wrong(format!("there is no field {name}"));
            };
            self.at(wanted, value, &format!("{place}.{name}"))?;
        }
        Ok(())
    }
}

fn is_of_type(name: &Value, value: &Value) -> bool {
    match name.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some("integer") => value.is_u64() || value.is_i64(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema(definition: &Value) -> Schema {
        Schema::new(&json!({ "$defs": { "x": definition, "y": true } }).to_string()).unwrap()
    }

    #[test]
    fn documents_that_differ_are_refused_with_the_place() {
        let definition = json!({
            "type": "object", "required": ["a", "b"],
            "properties": {
                "a": { "type": ["array", "null"], "items": { "type": "integer" } },
                "b": { "anyOf": [{ "const": "n" }, { "type": "string", "minLength": 3, "maxLength": 4 }] },
            },
        });
        for good in [json!({"a": null, "b": "n"}), json!({"a": [1, -1], "b": "abc"})] {
            schema(&definition).check("x", &good).unwrap();
        }
        for (bad, place) in [
            (json!({"a": null}), "no field b"),
            (json!({"a": null, "b": "n", "c": 1}), "no field c"),
            (json!({"a": [1, "2"], "b": "n"}), "x.a[1]"),
            (json!({"a": null, "b": "ab"}), "x.b"),
            (json!({"a": null, "b": "abcde"}), "x.b"),
            (json!([]), "is not \"object\""),
        ] {
            let said = schema(&definition).check("x", &bad).unwrap_err().to_string();
            assert!(said.contains(place), "{said}");
        }
    }

    #[test]
    fn a_schema_that_is_not_checked_wholly_is_refused() {
        for definition in [
            json!({ "pattern": "x" }),
            json!({ "$ref": "#/$defs/none" }),
            json!({ "properties": { "a": true }, "required": ["a"], "additionalProperties": false }),
            json!({ "properties": { "a": true }, "required": [] }),
            json!(false),
        ] {
            assert!(schema(&definition).check("x", &json!({ "a": 1 })).is_err(), "{definition}");
        }
        let mut one = schema(&json!({ "minItems": 1 }));
        assert!(one.check("x", &json!([])).is_err());
        assert_eq!(one.unmet(), ["y"]);
    }
}
