//! The OpenAPI document: what the routes cannot say of themselves.

use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Components, ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder, SecurityRequirement,
};
use utoipa::{OpenApi as _, PartialSchema, ToSchema};

use super::problem::ErrorBody;

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "iop",
        description = "Agents, their runs, and the gateway they run on. OpenAI's own API is at /v1.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "agents", description = "What agents are declared to be."),
        (name = "runs", description = "Runs of agents: begin, watch, read."),
        (name = "people", description = "What runs ask of people."),
        (name = "outside", description = "What reaches runs from other systems, and what they did there."),
        (name = "nodes", description = "Who serves models."),
        (name = "meta", description = "About this API.")
    )
)]
struct Base;

const KEY: &str = "api_key";
const ERROR: &str = "Error";

/// What is known before any route.
pub(super) fn base() -> OpenApi {
    Base::openapi()
}

/// With the key that every operation takes, and the error that each may answer.
pub(super) fn finished(mut document: OpenApi) -> OpenApi {
    let components = document.components.get_or_insert_with(Components::new);
    let bearer = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some("An API key. Without configured keys nobody needs one."))
        .build();
    components.add_security_scheme(KEY, SecurityScheme::Http(bearer));
    let mut schemas = Vec::new();
    ErrorBody::schemas(&mut schemas);
    schemas.push((ErrorBody::name().into_owned(), ErrorBody::schema()));
    components.schemas.extend(schemas);
    let error = ResponseBuilder::new()
        .description("An error, with its code.")
        .content(
            "application/json",
            ContentBuilder::new()
                .schema(Some(Ref::from_schema_name(ErrorBody::name())))
                .build(),
        )
        .build();
    components.responses.insert(ERROR.to_owned(), error.into());
    document.security = Some(vec![SecurityRequirement::new(KEY, Vec::<String>::new())]);
    for item in document.paths.paths.values_mut() {
        let operations: [&mut Option<Operation>; 4] =
            [&mut item.get, &mut item.put, &mut item.post, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            for (status, response) in &mut operation.responses.responses {
                if let RefOr::T(response) = response
                    && response.description.is_empty()
                {
                    response.description = said(status).to_owned();
                }
            }
            operation
                .responses
                .responses
                .entry("default".to_owned())
                .or_insert_with(|| RefOr::Ref(Ref::from_response_name(ERROR)));
        }
    }
    document
}

/// What a response without words of its own is.
fn said(status: &str) -> &'static str {
    match status {
        "201" => "It is made.",
        "202" => "It is stored and will be done.",
        "204" => "It is done.",
        _ => "As asked.",
    }
}
