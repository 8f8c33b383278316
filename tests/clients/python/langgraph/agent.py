import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from tool import SYSTEM, calculator

tools = [tool(calculator)]
model = ChatOpenAI(model="astuner").bind_tools(tools)

graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode(tools))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
answer = graph.compile().invoke({"messages": [SystemMessage(SYSTEM), HumanMessage(sys.stdin.read())]})
print(answer["messages"][-1].content)
