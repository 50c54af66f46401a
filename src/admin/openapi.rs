//! The OpenAPI 3.1 document, made from the routes, their fields and the types of their answers.

use std::collections::BTreeMap;

use axum::http::Method;
use serde_json::{Map, Value, json};
use utoipa::{PartialSchema as _, ToSchema as _};

use super::api::ACTOR_BYTES_MAX;
use super::fields::{DURATION_PATTERN, Field, Kind};
use super::problem::ProblemDocument;
use super::routes::{Answer, Body, ROUTES, Route, SchemaOf};

/// Of every path; what each means.
const PROBLEMS: &[(u16, &str)] = &[
    (400, "`bad_request`: a parameter, a member or the request itself; `field` names it."),
    (401, "`unauthorized`: a bearer token is needed, and this is none."),
    (403, "`browser`: without a token, no page of a browser may ask this."),
    (421, "`wrong_host`: a listener on a loopback address is asked by loopback's names alone."),
];
const BODY_PROBLEMS: &[(u16, &str)] = &[
    (408, "`body_late`: the body did not arrive in time."),
    (413, "`body_too_large`: a body has at most 64 KiB."),
    (415, "`wrong_content_type`: the body is JSON."),
];

/// The document, as it is served at `/v1/openapi.json`.
pub fn document() -> String {
    let mut schemas = BTreeMap::new();
    insert(&mut schemas, "Problem".to_owned(), serde_json::to_value(ProblemDocument::schema()));
    let mut others = Vec::new();
    ProblemDocument::schemas(&mut others);
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let operation = operation(route, &mut schemas);
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method.as_str().to_ascii_lowercase()] = operation;
    }
    let document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "inboxd admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description":
                "What operators ask of a running sidecar. Errors are problem details (RFC 9457) \
                 with a stable `code`. Unknown parameters and members are refused by name. Times \
                 are by the clock of the process that answers, made from ages by the database's \
                 clock.",
        },
        "tags": [
            {"name": "process"},
            {"name": "subscriptions"},
            {"name": "messages"},
            {"name": "dead letters"},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {
                "type": "http",
                "scheme": "bearer",
                "description":
                    "What `admin.token_file` holds; always asked for beyond loopback.",
            }},
        },
        // On loopback there may be no token.
        "security": [{}, {"token": []}],
    });
    document.to_string()
}

fn insert(schemas: &mut BTreeMap<String, Value>, name: String, schema: serde_json::Result<Value>) {
    // Types of this crate, without maps whose keys are no text.
    if let Ok(schema) = schema {
        schemas.insert(name, schema);
    }
}

fn reference(of: &SchemaOf, schemas: &mut BTreeMap<String, Value>) -> Value {
    let name = (of.name)();
    let mut others = Vec::new();
    (of.others)(&mut others);
    for (name, schema) in others {
        insert(schemas, name, serde_json::to_value(schema));
    }
    insert(schemas, name.clone(), serde_json::to_value((of.schema)()));
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn operation(route: &Route, schemas: &mut BTreeMap<String, Value>) -> Value {
    let mut operation = json!({
        "operationId": route.id,
        "tags": [route.tag],
        "summary": route.summary,
        "responses": responses(route, schemas),
    });
    if !route.about.is_empty() {
        operation["description"] = route.about.into();
    }
    let mut parameters: Vec<_> =
        route.in_path.iter().map(|field| parameter(field, "path")).collect();
    parameters.extend(route.query.iter().map(|field| parameter(field, "query")));
    if route.is_change {
        parameters.push(actor());
    }
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(body) = &route.body {
        operation["requestBody"] = request_body(body, schemas);
    }
    operation
}

fn parameter(field: &Field, place: &str) -> Value {
    json!({
        "name": field.name,
        "in": place,
        "required": field.needed,
        "description": field.about,
        "schema": schema(field.kind),
    })
}

fn actor() -> Value {
    json!({
        "name": "Inbox-Actor",
        "in": "header",
        "required": false,
        "description":
            "Who asks: for the log, and for the audit of dead letters, beside the address that \
             the request came from.",
        "schema": {
            "type": "string",
            "minLength": 1,
            "maxLength": ACTOR_BYTES_MAX,
            "pattern": "^[!-~]([ -~]*[!-~])?$",
        },
    })
}

fn request_body(body: &Body, schemas: &mut BTreeMap<String, Value>) -> Value {
    let mut properties = Map::new();
    for field in body.fields {
        let mut property = schema(field.kind);
        property["description"] = field.about.into();
        properties.insert(field.name.to_owned(), property);
    }
    let least = if body.is_patch { 1 } else { 0 };
    schemas.insert(
        body.name.to_owned(),
        json!({
            "type": "object",
            "description": body.about,
            "properties": properties,
            "additionalProperties": false,
            "minProperties": least,
        }),
    );
    let schema = json!({"schema": {"$ref": format!("#/components/schemas/{}", body.name)}});
    let mut content = json!({"application/json": schema});
    if body.is_patch {
        content["application/merge-patch+json"] = schema;
    }
    json!({"required": true, "content": content})
}

fn schema(kind: Kind) -> Value {
    match kind {
        Kind::Text { most } => json!({
            "type": "string",
            "minLength": 1,
            "maxLength": most,
            "pattern": "^[^\\u0000]+$",
        }),
        Kind::Id { most } => json!({"type": "string", "minLength": 1, "maxLength": most}),
        Kind::Integer { least, most } => json!({
            "type": "integer",
            "format": "int64",
            "minimum": least,
            "maximum": most,
        }),
        Kind::Number { least, most } => {
            json!({"type": "number", "minimum": least, "maximum": most})
        }
        Kind::NumberOrNull { least, most } => {
            json!({"type": ["number", "null"], "minimum": least, "maximum": most})
        }
        Kind::Flag => json!({"type": "boolean"}),
        Kind::Time => json!({"type": "string", "format": "date-time"}),
        Kind::Duration => json!({"type": "string", "pattern": DURATION_PATTERN}),
        Kind::Choice(choices) => json!({"type": "string", "enum": choices()}),
        Kind::Seqs { most } => json!({
            "type": "array",
            "minItems": 1,
            "maxItems": most,
            "items": {
                "type": "integer",
                "format": "int64",
                "minimum": 1,
                "maximum": i64::MAX,
            },
        }),
    }
}

fn responses(route: &Route, schemas: &mut BTreeMap<String, Value>) -> Value {
    let (about, content) = match &route.answer {
        Answer::Json(of) => {
            ("It is so.", json!({"application/json": {"schema": reference(of, schemas)}}))
        }
        Answer::JsonOrBytes(of) => (
            "JSON, or with `raw` the bytes alone.",
            json!({
                "application/json": {"schema": reference(of, schemas)},
                "application/octet-stream": {"schema": {}},
            }),
        ),
        Answer::Document => {
            ("The document.", json!({"application/json": {"schema": {"type": "object"}}}))
        }
    };
    let mut responses = json!({"200": {"description": about, "content": content}});
    let with_body: &[_] = if route.body.is_some() { BODY_PROBLEMS } else { &[] };
    // Whatever is sent with a request, its length is looked at.
    let sent: &[_] = if route.method == Method::GET { &[] } else { &BODY_PROBLEMS[1..2] };
    for (status, about) in PROBLEMS.iter().chain(sent).chain(with_body).chain(route.problems) {
        responses[status.to_string()] = problem(about);
    }
    responses
}

fn problem(about: &str) -> Value {
    json!({
        "description": about,
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}},
        },
    })
}
