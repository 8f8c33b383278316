-- The collector's file. The columns of span_table are those of AgentScope Studio 1.0.9, and responseId, which feedback
-- is looked up by. application_id and user_version: APPLICATION and VERSION of store.py.
BEGIN;
CREATE TABLE span_table (
  id varchar PRIMARY KEY NOT NULL,
  traceId varchar NOT NULL,
  spanId varchar NOT NULL,
  traceState varchar,
  parentSpanId varchar,
  flags integer,
  name varchar NOT NULL,
  kind integer NOT NULL,
  startTimeUnixNano varchar NOT NULL,
  endTimeUnixNano varchar NOT NULL,
  attributes json NOT NULL,
  droppedAttributesCount integer,
  events json,
  droppedEventsCount integer,
  links json,
  droppedLinksCount integer,
  status json NOT NULL,
  resource json NOT NULL,
  scope json NOT NULL,
  statusCode integer,
  serviceName varchar,
  operationName varchar,
  instrumentationName varchar,
  instrumentationVersion varchar,
  model varchar,
  inputTokens integer,
  outputTokens integer,
  totalTokens integer,
  conversationId varchar,
  latencyNs float NOT NULL,
  responseId varchar
);
CREATE TABLE feedback_table (
  id integer PRIMARY KEY AUTOINCREMENT,
  receivedAt float NOT NULL,
  responseId varchar,
  traceId varchar,
  conversationId varchar,
  rating float,
  correction text,
  comment text
);
CREATE INDEX span_trace ON span_table (traceId);
CREATE INDEX span_conversation ON span_table (conversationId) WHERE conversationId IS NOT NULL;
CREATE INDEX span_response ON span_table (responseId) WHERE responseId IS NOT NULL;
PRAGMA application_id = 1095980110;
PRAGMA user_version = 1;
COMMIT;
