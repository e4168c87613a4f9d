//! `docs/sublet.schema.json`, which is made of the types that are printed. `SUBLET_WRITE_SCHEMA=1 cargo test -p sublet-cli --all-features
//! schema` writes it.

use std::path::Path;
use std::{env, fs};

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::transform::{RecursiveTransform, Transform as _};
use schemars::{JsonSchema, Schema, json_schema};
use serde_json::Value;
use sublet_turns::TurnsView;
use tenants::budget::BudgetReport;
use tenants::keep::{PrepareReport, SaveReport};

use crate::change::document::{Changes, Document, SwapDocument};
use crate::change::plan::Plan;
use crate::output::Versioned;
use crate::view::View;
use crate::{doctor, failure, switch};

fn add<T: JsonSchema>(generator: &mut SchemaGenerator, name: &str, what: &str) -> Value {
    let mut schema = Versioned::<T>::json_schema(generator);
    schema.insert("description".to_owned(), what.into());
    generator.definitions_mut().insert(name.to_owned(), schema.into());
    json_schema!({ "$ref": format!("#/$defs/{name}") }).into()
}

/// Fields may be added anywhere. Descriptions are those of the code: links to names of it lead nowhere here, and a paragraph is
/// one line.
fn plain(schema: &mut Schema) {
    for keyword in ["additionalProperties", "format"] {
        schema.remove(keyword);
    }
    if let Some(Value::String(text)) = schema.get_mut("description") {
        *text = text.replace("[`", "`").replace("`]", "`").replace('\n', " ");
    }
}

fn schema() -> String {
    let generator = &mut SchemaSettings::draft2020_12().for_serialize().into_generator();
    let documents = [
        add::<View>(generator, "view", "sublet ps --json, sublet stats --json"),
        add::<Document<'_>>(
            generator,
            "change",
            "sublet pause --json, sublet resume --json; printed also when the command fails",
        ),
        add::<Changes<'_>>(generator, "changes", "sublet pause --all --json"),
        add::<Plan>(generator, "plan", "sublet pause --dry-run --json"),
        add::<SwapDocument<'_>>(
            generator,
            "swap",
            "sublet swap --json; printed also when the command fails",
        ),
        add::<switch::Account<'_>>(
            generator,
            "switch",
            "sublet switch --json; printed also when the command fails",
        ),
        add::<TurnsView>(generator, "turns", "sublet turns --json"),
        add::<PrepareReport>(generator, "prepare", "sublet prepare --json"),
        add::<SaveReport>(generator, "save", "sublet save --json"),
        add::<BudgetReport>(generator, "budget", "sublet budget --json"),
        add::<doctor::Findings<'_>>(generator, "doctor", "sublet doctor --json"),
        add::<failure::Document<'_>>(
            generator,
            "failed",
            "a command that ends before it comes to its own document",
        ),
    ];
    let mut whole = json_schema!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What sublet prints with --json",
        "description": "Sizes are in bytes and times in microseconds. Every field is always there; null says none. \
            Fields may be added.",
        "anyOf": documents,
        "$defs": generator.take_definitions(true),
    });
    RecursiveTransform(plain).transform(&mut whole);
    format!("{:#}\n", whole.as_value())
}

#[test]
fn the_schema_is_that_of_the_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/sublet.schema.json");
    let made = schema();
    if env::var_os("SUBLET_WRITE_SCHEMA").is_some() {
        fs::write(&path, &made).unwrap();
    }
    let is_same = fs::read_to_string(&path).unwrap() == made;
    assert!(
        is_same,
        "SUBLET_WRITE_SCHEMA=1 cargo test -p sublet-cli --all-features schema writes it"
    );
}
